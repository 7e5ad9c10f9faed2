// Package measure is what the command bench and make bench share: loads, and the processes that
// carry them, whose processor time is thereby not that of what is measured.
package measure
