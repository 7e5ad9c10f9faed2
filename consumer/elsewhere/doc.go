// Package elsewhere tests receivers in other languages than Go: node, python and java, shown in docs/receiving-elsewhere.md.
// Its tests run each as what it is, a program in a process of its own, and send it what a relay would.
package elsewhere
