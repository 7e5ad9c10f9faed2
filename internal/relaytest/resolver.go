package relaytest

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
)

// ResolverTo returns a resolver to which every name has the one IPv4 address that is answered at
// that moment.
func ResolverTo(t testing.TB, address func() netip.Addr) *net.Resolver {
	t.Helper()
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
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
			copy(answer[2:], []byte{0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0}) // a response; one question, nothing else yet
			if kind == 1 {                                               // A
				answer[7] = 1
				answer = append(answer, 0xc0, header, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
				answer = append(answer, address().AsSlice()...)
			}
			_, _ = server.WriteTo(answer, from)
		}
	}()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", server.LocalAddr().String())
	}}
}
