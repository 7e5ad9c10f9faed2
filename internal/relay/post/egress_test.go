package post_test

import (
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A destination on this host is served in any spelling.
func TestThisHostIsReached(t *testing.T) {
	t.Parallel()
	rc := relaytest.NewReceiver(t, nil)
	_, port, _ := net.SplitHostPort(rc.Listener.Addr().String())
	for _, host := range []string{"127.0.0.1", "[::ffff:127.0.0.1]", "localhost"} {
		if v := exchangeAt(t, "http://"+host+":"+port+"/"); v.Outcome != policy.Delivered {
			t.Errorf("%s: %s %q", host, v.Reason, v.Message)
		}
	}
}

// Every way of writing an address that must not be reached through the relay, and what is said of
// it. Some spellings a configuration refuses before anything is dialled; the dialler does not rely
// on that.
func TestSecurityForbiddenAddresses(t *testing.T) {
	t.Parallel()
	const (
		metadataText = "metadata service"
		special      = "not a permitted destination"
		disguise     = "in disguise"
		noName       = ""
	)
	// What is not an address is looked up, with a resolver that means no good.
	resolver := relaytest.ResolverTo(t, func() netip.Addr { return netip.MustParseAddr("169.254.169.254") })
	for _, c := range []struct {
		host    string
		want    policy.Reason
		message string
	}{
		// Link-local, where clouds hand out credentials: AWS, Google, Azure, Oracle, OpenStack,
		// DigitalOcean, Hetzner.
		{"169.254.169.254", policy.ReasonEgress, special},
		{"169.254.170.2", policy.ReasonEgress, special},
		{"169.254.0.1", policy.ReasonEgress, special},
		{"169.254.169.254.", policy.ReasonDNS, noName},
		{"①⑥⑨.②⑤④.①⑥⑨.②⑤④", policy.ReasonEgress, special},
		{"１６９.254.169.254", policy.ReasonEgress, special},
		{"169。254。169。254", policy.ReasonEgress, special},
		{"169．254．169．254", policy.ReasonEgress, special},
		{"169｡254｡169｡254", policy.ReasonEgress, special},
		{"0xa9.254.169.254", policy.ReasonEgress, special},
		{"0XA9.0XFE.0XA9.0XFE", policy.ReasonEgress, special},
		{"0251.0376.0251.0376", policy.ReasonDNS, noName},
		{"2852039166", policy.ReasonDNS, noName},
		{"0xa9fea9fe", policy.ReasonEgress, special},
		{"169.16689662", policy.ReasonDNS, noName},
		{"[fe80::1]", policy.ReasonEgress, special},
		{"[fe80::a9fe:a9fe]", policy.ReasonEgress, special},
		{"[fe80::a9fe:a9fe%25lo]", policy.ReasonEgress, special},
		{"[febf::1]", policy.ReasonEgress, special},
		// Metadata elsewhere.
		{"168.63.129.16", policy.ReasonEgress, metadataText},
		{"[::ffff:168.63.129.16]", policy.ReasonEgress, metadataText},
		{"[64:ff9b::168.63.129.16]", policy.ReasonEgress, metadataText},
		{"100.100.100.200", policy.ReasonEgress, metadataText},
		{"[::ffff:100.100.100.200]", policy.ReasonEgress, metadataText},
		{"192.0.0.192", policy.ReasonEgress, special},
		{"[fd00:ec2::254]", policy.ReasonEgress, metadataText},
		{"[fd00:ec2::254%25lo]", policy.ReasonEgress, metadataText},
		{"[fd20:ce::254]", policy.ReasonEgress, metadataText},
		{"[fd00:c1::a9fe:a9fe]", policy.ReasonEgress, metadataText},
		{"[fd00:42::42]", policy.ReasonEgress, metadataText},
		// An IPv4 address within an IPv6 one: mapped, compatible, translated, NAT64, 6to4, Teredo,
		// ISATAP.
		{"[::ffff:169.254.169.254]", policy.ReasonEgress, special},
		{"[::ffff:a9fe:a9fe]", policy.ReasonEgress, special},
		{"[0:0:0:0:0:ffff:a9fe:a9fe]", policy.ReasonEgress, special},
		{"[::FFFF:A9FE:A9FE]", policy.ReasonEgress, special},
		{"[::ffff:169.254.169.254%25lo]", policy.ReasonEgress, "invalid host:port"},
		{"[::169.254.169.254]", policy.ReasonEgress, special},
		{"[::127.0.0.1]", policy.ReasonEgress, special},
		{"[::ffff:0:169.254.169.254]", policy.ReasonEgress, special},
		{"[64:ff9b::a9fe:a9fe]", policy.ReasonEgress, special},
		{"[64:ff9b::10.0.0.1]", policy.ReasonEgress, disguise},
		{"[64:ff9b::127.0.0.1]", policy.ReasonEgress, disguise},
		{"[64:ff9b::100.64.0.1]", policy.ReasonEgress, disguise},
		{"[64:ff9b:1::a9fe:a9fe]", policy.ReasonEgress, special},
		{"[64:ff9b:1:ffff::8.8.8.8]", policy.ReasonEgress, special},
		{"[2002:a9fe:a9fe::1]", policy.ReasonEgress, special},
		{"[2002:7f00:1::]", policy.ReasonEgress, special},
		{"[2001:0:a9fe:a9fe::1]", policy.ReasonEgress, special},
		{"[2001:0:4136:e378:8000:63bf:5601:5601]", policy.ReasonEgress, special},
		{"[2606:4700::5efe:a9fe:a9fe]", policy.ReasonEgress, disguise},
		{"[2606:4700::200:5efe:10.0.0.1]", policy.ReasonEgress, disguise},
		{"[fd12::5efe:169.254.169.254]", policy.ReasonEgress, disguise},
		// No host's own.
		{"0.0.0.0", policy.ReasonEgress, special},
		{"0.1.2.3", policy.ReasonEgress, special},
		{"0", policy.ReasonDNS, noName},
		{"[::]", policy.ReasonEgress, special},
		{"[::ffff:0.0.0.0]", policy.ReasonEgress, special},
		{"192.0.0.1", policy.ReasonEgress, special},
		{"192.0.2.1", policy.ReasonEgress, special},
		{"192.88.99.1", policy.ReasonEgress, special},
		{"198.18.0.1", policy.ReasonEgress, special},
		{"198.51.100.1", policy.ReasonEgress, special},
		{"203.0.113.1", policy.ReasonEgress, special},
		{"224.0.0.1", policy.ReasonEgress, special},
		{"239.255.255.250", policy.ReasonEgress, special},
		{"240.0.0.1", policy.ReasonEgress, special},
		{"255.255.255.255", policy.ReasonEgress, special},
		{"[ff02::1]", policy.ReasonEgress, special},
		{"[2001:db8::1]", policy.ReasonEgress, special},
		{"[3fff::1]", policy.ReasonEgress, special},
		{"[fec0::1]", policy.ReasonEgress, special},
		{"[100::1]", policy.ReasonEgress, special},
		{"[5f00::1]", policy.ReasonEgress, special},
	} {
		d := destinationOf("http://"+c.host+":1/latest/meta-data", post.Wire{}, post.Egress{})
		d.URL = "http://" + c.host + ":1/latest/meta-data"
		e := endpointOf(t, d)
		dialer := post.Egress{}.Dialer(relaytest.Patience)
		dialer.Resolver = resolver
		e.Dial = dialer.DialContext
		v := exchange(t, e)
		t.Logf("%-40s %-7s %-7s %s", c.host, v.Outcome, v.Reason, v.Message)
		if v.Outcome != policy.Retry || v.Reason != c.want || !strings.Contains(v.Message, c.message) || v.StatusCode != 0 {
			t.Errorf("%s: %s %s %q, want %s %q", c.host, v.Outcome, v.Reason, v.Message, c.want, c.message)
		}
		refused := d.Problems("destinations.default")
		if len(refused) == 0 && c.want != policy.ReasonEgress {
			t.Errorf("%s: the configuration takes it", c.host)
		}
	}
}

// Which addresses may be dialled, by what the configuration says of private networks.
func TestSecurityAllowPrivate(t *testing.T) {
	t.Parallel()
	networks := func(list ...string) []netip.Prefix {
		all := []netip.Prefix{}
		for _, s := range list {
			all = append(all, netip.MustParsePrefix(s))
		}
		return all
	}
	some := networks("10.20.0.0/16", "127.0.0.1/32", "fd12:3456::/32")
	for _, c := range []struct {
		address                string
		everything, some, none bool
	}{
		{"10.20.30.40", true, true, false},
		{"::ffff:10.20.30.40", true, true, false},
		{"10.21.0.1", true, false, false},
		{"::ffff:10.21.0.1", true, false, false},
		{"172.16.0.1", true, false, false},
		{"172.32.0.1", true, true, true}, // public
		{"192.168.1.1", true, false, false},
		{"100.64.0.1", true, false, false},
		{"127.0.0.1", true, true, false},
		{"127.0.0.2", true, false, false},
		{"::1", true, false, false},
		{"fd12:3456::1", true, true, false},
		{"fd13::1", true, false, false},
		{"8.8.8.8", true, true, true},
		{"2606:4700::1111", true, true, true},
		{"64:ff9b::8.8.8.8", true, true, true}, // NAT64
		{"64:ff9b::10.20.30.40", false, false, false},
		{"169.254.169.254", false, false, false},
		{"168.63.129.16", false, false, false},
		{"fd00:ec2::254", false, false, false},
	} {
		address := netip.MustParseAddr(c.address)
		for i, rule := range []struct {
			egress post.Egress
			want   bool
		}{{post.Egress{}, c.everything}, {post.Egress{AllowPrivate: some}, c.some}, {post.Egress{AllowPrivate: networks()}, c.none}} {
			network := "tcp4"
			if address.Is6() {
				network = "tcp6"
			}
			err := rule.egress.Control(t.Context(), network, netip.AddrPortFrom(address, 443).String(), nil)
			if (err == nil) != rule.want || err != nil && policy.ErrorReason(err) != policy.ReasonEgress {
				t.Errorf("%s under rule %d: %v", c.address, i, err)
			}
		}
	}
	for _, odd := range [][2]string{{"udp4", "8.8.8.8:53"}, {"unix", "/var/run/x.sock"}, {"tcp4", "nonsense"}, {"tcp", "127.0.0.1:80"}} {
		if err := (post.Egress{}).Control(t.Context(), odd[0], odd[1], nil); err == nil {
			t.Errorf("%s is dialled", odd)
		}
	}
	testkit.ErrorContains(t, "error", (post.Egress{AllowPrivate: some}).Guard(netip.MustParseAddr("10.21.0.1")), "10.21.0.1 is private and not within egress.allow_private")
	rc := relaytest.NewReceiver(t, nil)
	if v := exchangeWith(t, destinationOf(rc.URL, post.Wire{}, post.Egress{AllowPrivate: networks("10.0.0.0/8")})); v.Reason != policy.ReasonEgress {
		t.Errorf("a destination outside: %s %q", v.Reason, v.Message)
	}
	if v := exchangeWith(t, destinationOf(rc.URL, post.Wire{}, post.Egress{AllowPrivate: some})); v.Outcome != policy.Delivered {
		t.Errorf("a destination inside: %s %q", v.Reason, v.Message)
	}
}

// A name whose answer changes between two looks: what is judged is the address that is dialled, at
// every dial.
func TestSecurityDNSRebinding(t *testing.T) {
	t.Parallel()
	rc := relaytest.NewReceiver(t, nil)
	_, port, err := net.SplitHostPort(rc.Listener.Addr().String())
	relaytest.Must(t, err)
	loopback := netip.MustParseAddr("127.0.0.1")
	for _, c := range []struct {
		egress post.Egress
		second string
		want   policy.Reason
	}{
		{post.Egress{}, "127.0.0.1", policy.ReasonOK},
		{post.Egress{}, "169.254.169.254", policy.ReasonEgress},
		{post.Egress{}, "168.63.129.16", policy.ReasonEgress},
		{post.Egress{}, "0.0.0.0", policy.ReasonEgress},
		{post.Egress{AllowPrivate: []netip.Prefix{netip.PrefixFrom(loopback, 32)}}, "127.0.0.2", policy.ReasonEgress},
		{post.Egress{AllowPrivate: []netip.Prefix{netip.PrefixFrom(loopback, 32)}}, "10.0.0.1", policy.ReasonEgress},
	} {
		var answer atomic.Pointer[netip.Addr]
		answer.Store(&loopback)
		e := endpointOf(t, destinationOf("http://harmless.example.com:"+port+"/", post.Wire{}, c.egress))
		dialer := c.egress.Dialer(relaytest.Patience)
		dialer.Resolver = relaytest.ResolverTo(t, func() netip.Addr { return *answer.Load() })
		e.Dial = dialer.DialContext
		if v := exchange(t, e); v.Outcome != policy.Delivered {
			t.Errorf("before: %s %q", v.Reason, v.Message)
		}
		second := netip.MustParseAddr(c.second)
		answer.Store(&second)
		e.CloseIdleConnections()
		v := exchange(t, e)
		t.Logf("127.0.0.1, then %-16s %-9s %-7s %s", c.second, v.Outcome, v.Reason, v.Message)
		if v.Reason != c.want {
			t.Errorf("%s: %s %q, want %s", c.second, v.Reason, v.Message, c.want)
		}
		e.CloseIdleConnections()
	}
}
