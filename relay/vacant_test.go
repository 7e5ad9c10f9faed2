package relay

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A vacant address is one at which nothing listens and connections are refused. It stays this
// test's: a port that is only closed again soon belongs to another process.
type vacant struct {
	url  string
	file *os.File // a socket that is bound and does not listen
}

func newVacant(tb testing.TB) *vacant {
	tb.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	relaytest.Must(tb, err)
	syscall.CloseOnExec(fd)
	v := &vacant{file: os.NewFile(uintptr(fd), "vacant")}
	tb.Cleanup(func() { _ = v.file.Close() })
	relaytest.Must(tb, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	bound, err := syscall.Getsockname(fd)
	relaytest.Must(tb, err)
	address := net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: bound.(*syscall.SockaddrInet4).Port}
	v.url = "http://" + address.String()
	return v
}

// open lets a server listen there, at last.
func (v *vacant) open(tb testing.TB, h http.Handler) {
	tb.Helper()
	relaytest.Must(tb, syscall.Listen(int(v.file.Fd()), 128))
	listener, err := net.FileListener(v.file)
	relaytest.Must(tb, err)
	relaytest.Must(tb, v.file.Close()) // the listener has its own
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: h}}
	server.Start()
	tb.Cleanup(server.Close)
}
