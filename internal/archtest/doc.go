// Package archtest tests the architecture. It contains nothing but tests: each rule that
// CONTRIBUTING.md states is a function that reads the source and returns the violations. Each runs
// on this repository and on snippets that break the rule, because a check that never failed proves
// nothing. Linters check what they can; their rules are not repeated here.
package archtest
