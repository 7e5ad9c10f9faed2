package relay

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A destination on this host is served in any spelling.
func TestThisHostIsReached(t *testing.T) {
	t.Parallel()
	rc := newReceiver(t, nil)
	_, port, _ := net.SplitHostPort(rc.Listener.Addr().String())
	for _, host := range []string{"127.0.0.1", "[::ffff:127.0.0.1]", "localhost"} {
		if v := attemptAt(t, "http://"+host+":"+port+"/"); v.Outcome != policy.Delivered {
			t.Errorf("%s: %s %q", host, v.Reason, v.Message)
		}
	}
}

// resolverTo returns a resolver to which every name has the one IPv4 address that is answered at that moment.
func resolverTo(t testing.TB, address func() netip.Addr) *net.Resolver {
	t.Helper()
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
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

// The environment's proxy would be dialled instead of the destination, past every check.
func TestSecurityEnvironmentProxyIsIgnored(t *testing.T) {
	proxy := newReceiver(t, nil)
	rc := newReceiver(t, nil)
	t.Setenv("HTTP_PROXY", proxy.URL)
	t.Setenv("http_proxy", proxy.URL)
	if v := attemptAt(t, rc.URL); v.Outcome != policy.Delivered {
		t.Errorf("%s %q", v.Reason, v.Message)
	}
	if l, err := laneTo(to("http://receiver.test/")); err != nil || l.Transport.Proxy != nil {
		t.Error("a proxy is asked for")
	}
	if proxy.total() != 0 || rc.total() != 1 {
		t.Errorf("%d requests at the proxy", proxy.total())
	}
}
