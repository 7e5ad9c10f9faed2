//go:build !linux

package run

// releaseProgram does nothing: other systems do not count pages of the program's file as the process's.
func releaseProgram() {}
