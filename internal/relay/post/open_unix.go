//go:build unix

package post

import (
	"net"
	"syscall"
)

// canSeeClosed says that isOpen knows.
const canSeeClosed = true

// isOpen reports whether a connection on which nothing is expected is as it should be: neither
// closed by its other side, nor with something to read that was not asked for.
func isOpen(conn net.Conn) bool {
	raw, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	control, err := raw.SyscallConn()
	if err != nil {
		return false
	}
	open := false
	err = control.Read(func(fd uintptr) bool {
		var one [1]byte
		_, err := syscall.Read(int(fd), one[:])
		open = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK
		return true // do not wait
	})
	return err == nil && open
}
