// Package shortsleep sleeps for less than a millisecond. In a process that has nothing else to do
// Go's own timers end up to a millisecond late: its poller asks the kernel for whole ones
// (https://go.dev/issue/53824).
package shortsleep
