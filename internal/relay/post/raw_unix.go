//go:build unix

package post

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
)

// A rawConn makes an exchange on a kept TCP connection with three system calls. One read sees that
// the connection is open and empty, then comes the write, and one read for the answer once that is
// there. By way of net.Conn there would be a read before that, for nothing.
type rawConn struct {
	conn syscall.RawConn
	next func(fd uintptr) (done bool) // step, bound once

	request, into []byte
	began, open   bool
	sent, n       int
	written, err  error
	one           [1]byte
}

// newRawConn returns nil for a connection that is none of TCP, a test's for instance.
func newRawConn(conn net.Conn) *rawConn {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	x := &rawConn{conn: raw}
	x.next = x.step
	return x
}

// exchange writes a request, and reads the beginning of its answer.
func (x *rawConn) exchange(c *directConn, request, into []byte) (int, error) {
	x.request, x.into = request, into
	x.began, x.open, x.sent, x.n, x.written, x.err = false, false, 0, 0, nil, nil
	err := x.conn.Read(x.next)
	x.request, x.into = nil, nil
	c.sent, c.written = x.sent, x.written
	switch {
	case !x.began:
		return 0, err
	case !x.open:
		return 0, errStale
	case x.written != nil && x.sent == 0:
		return 0, x.written
	case x.sent < len(request): // more than the connection's buffer takes at once
		return c.writeAndRead(request[x.sent:], into)
	case err != nil:
		return 0, err
	}
	return x.n, x.err
}

// step is called first when the poller has been told to report what arrives from now on, and then
// whenever something has.
func (x *rawConn) step(fd uintptr) (done bool) {
	if x.began {
		n, err := again(syscall.Read, fd, x.into)
		switch {
		case errors.Is(err, syscall.EAGAIN):
			return false
		case err != nil:
			x.err = &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", err)}
		case n == 0:
			x.err = io.EOF
		}
		x.n = max(n, 0)
		return true
	}
	x.began = true
	_, err := again(syscall.Read, fd, x.one[:])
	if x.open = errors.Is(err, syscall.EAGAIN); !x.open {
		return true
	}
	n, err := again(syscall.Write, fd, x.request)
	x.sent = max(n, 0)
	if err != nil && !errors.Is(err, syscall.EAGAIN) {
		x.written = &net.OpError{Op: "write", Net: "tcp", Err: os.NewSyscallError("write", err)}
	}
	return x.sent < len(x.request)
}

// again repeats a call that a signal has interrupted.
func again(call func(fd int, b []byte) (int, error), fd uintptr, b []byte) (n int, err error) {
	for {
		if n, err = call(int(fd), b); !errors.Is(err, syscall.EINTR) {
			return n, err
		}
	}
}
