package relaytest

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"
)

// ResolverTo returns a resolver to which every name has the one IPv4 address that is answered at
// that moment.
func ResolverTo(t testing.TB, address func() netip.Addr) *net.Resolver {
	t.Helper()
	server := ServeNames(t, "127.0.0.1:0", func() Names { return Names{Address: address()} })
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", server.String())
	}}
}

// Names is what a server says of every name: the one IPv4 address that it has, or none.
type Names struct {
	Address netip.Addr
	After   time.Duration
	Code    byte // of an error; 0: there is none
	Silent  bool // it says nothing
}

// ServeNames answers each question for a name at a UDP address, until the test ends.
func ServeNames(t testing.TB, address string, say func() Names) net.Addr {
	t.Helper()
	server, err := net.ListenPacket("udp", address)
	Must(t, err)
	t.Cleanup(func() { _ = server.Close() })
	go func() {
		buffer := make([]byte, 512)
		for {
			n, from, err := server.ReadFrom(buffer)
			if err != nil {
				return
			}
			const header = 12
			end := header
			for end < n && buffer[end] != 0 {
				end += int(buffer[end]) + 1
			}
			end += 5 // the root label, type and class
			kind := binary.BigEndian.Uint16(buffer[end-4:])
			answer := append([]byte(nil), buffer[:end]...)
			said := say()
			copy(answer[2:], []byte{0x81, 0x80 | said.Code, 0, 1, 0, 0, 0, 0, 0, 0}) // a response; one question, nothing else yet
			if kind == 1 && said.Address.IsValid() {                                 // A
				answer[7] = 1
				answer = append(answer, 0xc0, header, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
				answer = append(answer, said.Address.AsSlice()...)
			}
			if !said.Silent {
				time.AfterFunc(said.After, func() { _, _ = server.WriteTo(answer, from) })
			}
		}
	}()
	return server.LocalAddr()
}
