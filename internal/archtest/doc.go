// Package archtest keeps the architecture by machine. It holds nothing but tests: each rule that CONTRIBUTING.md states
// is a function that reads the source and returns what breaks it, run once on this repository and once on snippets that
// break it on purpose. A checker that never failed proves nothing.
package archtest
