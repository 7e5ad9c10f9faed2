// Package process runs the programs of demonstrations: real processes that do not outlive the one
// that started them, and can be killed.
//
//	stage.go    a throwaway PostgreSQL, and what is played on it
//	unit.go     a role whose process is started again whenever it ends
//	process.go  one process, and its guard
package process
