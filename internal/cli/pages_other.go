//go:build !linux

package cli

// ReleaseProgram does nothing: other systems do not count pages of the program's file as the
// process's.
func ReleaseProgram() {}
