package relay

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"
)

// What counts is the address that is dialled, not the text of the URL.
func TestForbiddenAddressesAreNotDialled(t *testing.T) {
	t.Parallel()
	for _, host := range []string{
		"169.254.169.254", "169.254.0.1", "①⑥⑨.②⑤④.169.254", "１６９.254.169.254", "[fe80::1]", "[fe80::a9fe:a9fe]",
		"[fd00:ec2::254]", "[::ffff:169.254.169.254]", "[::169.254.169.254]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::a9fe:a9fe]",
		"[2002:a9fe:a9fe::1]", "[2001:0:a9fe:a9fe::1]", "0.0.0.0", "0.1.2.3", "[::]", "100.100.100.200", "[::ffff:100.100.100.200]",
		"192.0.0.192", "198.18.0.1", "203.0.113.1", "192.0.2.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "[ff02::1]", "[2001:db8::1]",
		"[fec0::1]", "[100::1]", "[3fff::1]", "[5f00::1]",
	} {
		d := Config{Destinations: []Destination{to("http://" + host + ":1/latest/meta-data")}}.withDefaults().Destinations[0]
		if v := attemptWith(t, d); v.outcome != Retry || v.reason != ReasonEgress || v.statusCode != 0 {
			t.Errorf("%s: %s %s %q", host, v.outcome, v.reason, v.message)
		}
	}
}

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
		if v := attemptAt(t, "http://"+host+":"+port+"/"); v.outcome != Delivered {
			t.Errorf("%s: %s %q", host, v.reason, v.message)
		}
	}
}

// A harmless name that resolves to a forbidden address, as in DNS rebinding.
func TestNamesThatResolveToForbiddenAddresses(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"169.254.169.254", "100.100.100.200", "0.0.0.0"} {
		d := Config{Destinations: []Destination{to("http://harmless.example.com:1/")}}.withDefaults().Destinations[0]
		l, err := laneTo(d)
		must(t, err)
		dialer := &net.Dialer{ControlContext: Egress{}.control, Resolver: resolverOf(t, netip.MustParseAddr(address))}
		l.transport.DialContext = dialer.DialContext
		r := &Relay{taking: t.Context(), doing: t.Context()}
		harmless := order()
		harmless.leaseEnds = time.Now().Add(time.Hour)
		if v := r.attempt(l, &harmless); v.reason != ReasonEgress {
			t.Errorf("%s: %s %q", address, v.reason, v.message)
		}
	}
}

// resolverOf returns a resolver to which every name has one IPv4 address.
func resolverOf(t testing.TB, address netip.Addr) *net.Resolver {
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
				answer = append(answer, address.AsSlice()...)
			}
			_, _ = server.WriteTo(answer, from)
		}
	}()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", server.LocalAddr().String())
	}}
}

// The environment's proxy would be dialled instead of the destination, past every check.
func TestEnvironmentProxyIsIgnored(t *testing.T) {
	proxy := newReceiver(t, nil)
	rc := newReceiver(t, nil)
	t.Setenv("HTTP_PROXY", proxy.URL)
	t.Setenv("http_proxy", proxy.URL)
	if v := attemptAt(t, rc.URL); v.outcome != Delivered {
		t.Errorf("%s %q", v.reason, v.message)
	}
	if l, err := laneTo(to("http://receiver.test/")); err != nil || l.transport.Proxy != nil || alertTransport.Proxy != nil {
		t.Error("a proxy is asked for")
	}
	if proxy.total() != 0 || rc.total() != 1 {
		t.Errorf("%d requests at the proxy", proxy.total())
	}
}
