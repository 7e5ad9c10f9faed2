//go:build !linux

package hangup

// Handle does nothing: elsewhere than on Linux SIGHUP is not ignored before.
func Handle() {}
