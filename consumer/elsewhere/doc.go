// Package elsewhere tests receivers in other languages than Go: node, python and java, of
// docs/receiving-elsewhere.md. Its tests run each as what it is, a program in its own process, and
// send it what a relay would.
package elsewhere
