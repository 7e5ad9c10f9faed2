package relay

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Destinations are named in the configuration: this host and private networks are theirs to use, in any spelling.
func TestAllowedAddresses(t *testing.T) {
	t.Parallel()
	for _, address := range []string{
		"127.0.0.1:80", "[::1]:80", "10.1.2.3:8080", "172.16.0.1:80", "192.168.1.1:443", "100.64.0.1:80", "[fd12:3456::1]:80",
		"8.8.8.8:443", "[2606:4700::1111]:443", "1.1.1.1:1",
	} {
		network := "tcp4"
		if netip.MustParseAddrPort(address).Addr().Is6() {
			network = "tcp6"
		}
		if err := (Egress{}).control(t.Context(), network, address, nil); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
	for _, odd := range [][2]string{{"udp4", "8.8.8.8:53"}, {"unix", "/var/run/x.sock"}, {"tcp4", "nonsense"}, {"tcp", "127.0.0.1:80"}} {
		if err := (Egress{}).control(t.Context(), odd[0], odd[1], nil); err == nil {
			t.Errorf("%s is dialled", odd)
		}
	}
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
	if l, err := laneTo(to("http://receiver.test/")); err != nil || l.transport.Proxy != nil {
		t.Error("a proxy is asked for")
	}
	if proxy.total() != 0 || rc.total() != 1 {
		t.Errorf("%d requests at the proxy", proxy.total())
	}
}
