package testkit

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"syscall"
	"testing"
)

// A Vacant is an address of the loopback interface at which nothing listens, so that connections
// are refused. It stays reserved for the test: a server that asks for this port gets it, and one
// that asks for any port does not.
type Vacant struct {
	Address string   // host:port
	URL     string   // http
	Socket  *os.File // bound to it
}

// NewVacant returns one until t ends.
func NewVacant(t testing.TB) *Vacant {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	Must(t, err)
	syscall.CloseOnExec(fd)
	v := &Vacant{Socket: os.NewFile(uintptr(fd), "vacant")}
	t.Cleanup(func() { _ = v.Socket.Close() })
	Must(t, syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1))
	Must(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	bound, err := syscall.Getsockname(fd)
	Must(t, err)
	v.Address = (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: bound.(*syscall.SockaddrInet4).Port}).String()
	v.URL = "http://" + v.Address
	return v
}

// Open lets a server listen there.
func (v *Vacant) Open(t testing.TB, h http.Handler) {
	t.Helper()
	Must(t, syscall.Listen(int(v.Socket.Fd()), 128))
	listener, err := net.FileListener(v.Socket)
	Must(t, err)
	Must(t, v.Socket.Close()) // the listener has its own
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: h, ReadHeaderTimeout: Patience}}
	server.Start()
	t.Cleanup(server.Close)
}
