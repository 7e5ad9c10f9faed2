package shortsleep

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A clock is a timer of the kernel (timerfd_create(2)), whose end wakes Go's poller like data on a
// connection.
type clock struct {
	fd          int // of file, which would no longer be waited for by the poller after File.Fd
	file        *os.File
	expirations [8]byte
}

func newClock() clock {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return clock{}
	}
	return clock{fd: fd, file: os.NewFile(uintptr(fd), "timerfd")}
}

// sleep reports whether it slept.
func (c *clock) sleep(d time.Duration) bool {
	if c.file == nil {
		return false
	}
	if err := unix.TimerfdSettime(c.fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}, nil); err != nil {
		return false
	}
	_, err := c.file.Read(c.expirations[:])
	return err == nil
}

func (c *clock) close() {
	if c.file != nil {
		_ = c.file.Close()
		c.file = nil
	}
}
