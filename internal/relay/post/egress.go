package post

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"

	"code.dny.dev/ssrf"

	"github.com/outbox-relay/outbox-relay/internal/check"
)

// Egress says where the relay may connect to, and through what. The zero value: to every public
// address and every private network, directly.
type Egress struct {
	// AllowPrivate lists the private networks that may be dialled, parts of 10.0.0.0/8,
	// 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, 127.0.0.0/8, fc00::/7 and ::1/128. nil: all of
	// these, as destinations are named in the configuration. Empty but not nil: none. What is
	// neither public nor private is never dialled, whatever stands here: link-local addresses, the
	// metadata services of clouds, IPv6 addresses that lead to IPv4 ones in disguise.
	AllowPrivate []netip.Prefix
	// Proxy through which destinations and alert channels are reached:
	// "http://[user:password@]host:port". The proxy's address is judged like a destination's; the
	// name of a destination is resolved by the proxy, so that only an address that stands in the
	// URL is judged here. Empty: none. The environment's proxy is never used.
	Proxy string
}

// NoProxy as a destination's proxy reaches it directly although [Egress] names a proxy.
const NoProxy = "none"

// Networks that destinations may be in because the configuration names them, this host included.
var privateNetworks = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("fc00::/7"), netip.MustParsePrefix("::1/128"),
}

// Metadata services of clouds, which hand credentials to every caller, at addresses that are
// private or public otherwise. Those at link-local addresses, nearly all, and in 192.0.0.0/24 need
// no mention.
var metadata = []netip.Prefix{
	netip.MustParsePrefix("fd00:ec2::/32"),          // AWS
	netip.MustParsePrefix("fd20:ce::/32"),           // Google Cloud
	netip.MustParsePrefix("168.63.129.16/32"),       // Azure
	netip.MustParsePrefix("100.100.100.200/32"),     // Alibaba Cloud
	netip.MustParsePrefix("fd00:c1::a9fe:a9fe/128"), // Oracle Cloud
	netip.MustParsePrefix("fd00:42::42/128"),        // Scaleway
}

// guardian knows the special addresses of IANA's registries.
var guardian = ssrf.New(ssrf.WithAllowedV4Prefixes(privateNetworks...), ssrf.WithAllowedV6Prefixes(privateNetworks...))

// Dialer returns a dialer that decides on every address immediately before it connects: a check of
// a URL's text would miss names that resolve to forbidden addresses, and other spellings of them.
// Whatever the relay dials, its database apart, it dials with one of these.
func (e Egress) Dialer(timeout time.Duration) *net.Dialer {
	return &net.Dialer{Timeout: timeout, KeepAlive: 15 * time.Second, ControlContext: e.Control}
}

// Control refuses a connection that is about to be made.
func (e Egress) Control(_ context.Context, network, address string, _ syscall.RawConn) error {
	if network != "tcp4" && network != "tcp6" {
		return fmt.Errorf("%w: %s", ssrf.ErrProhibitedNetwork, network)
	}
	addrPort, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("%w: %s", ssrf.ErrInvalidHostPort, address)
	}
	return e.Guard(addrPort.Addr())
}

// Guard refuses an address that may not be dialled.
func (e Egress) Guard(address netip.Addr) error {
	address = address.Unmap().WithZone("")
	switch {
	case covers(metadata, address):
		return fmt.Errorf("%w: %s is a cloud's metadata service, which is never dialled", ssrf.ErrProhibitedIP, address)
	case ssrf.IPv6NAT64Prefix.Contains(address):
		// The gateway dials what the last four bytes say, from its own place in the network.
		behind := netip.AddrFrom4([4]byte(address.AsSlice()[12:]))
		if covers(privateNetworks, behind) {
			return fmt.Errorf("%w: %s leads to the private address %s in disguise", ssrf.ErrProhibitedIP, address, behind)
		}
		return e.Guard(behind)
	case isISATAP(address):
		return fmt.Errorf("%w: %s leads to an IPv4 address in disguise", ssrf.ErrProhibitedIP, address)
	case covers(privateNetworks, address):
		if e.AllowPrivate != nil && !covers(e.AllowPrivate, address) {
			return fmt.Errorf("%w: %s is private and not within egress.allow_private", ssrf.ErrProhibitedIP, address)
		}
		return nil
	}
	return guardian.SafeAddr(address)
}

// isISATAP reports whether an address is one of the intra-site tunnels of RFC 5214, under whatever
// prefix: a host that still speaks it sends the packets to the IPv4 address in the last four bytes.
func isISATAP(address netip.Addr) bool {
	if !address.Is6() {
		return false
	}
	id := address.As16()
	return id[8]&^0x02 == 0 && id[9] == 0 && id[10] == 0x5e && id[11] == 0xfe
}

func covers(networks []netip.Prefix, address netip.Addr) bool {
	return slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(address) })
}

// Problems returns the mistakes in an Egress.
func (e Egress) Problems(path string) []check.Problem {
	var v check.Problems
	for i, network := range e.AllowPrivate {
		private := slices.ContainsFunc(privateNetworks, func(n netip.Prefix) bool {
			return n.Bits() <= network.Bits() && n.Contains(network.Addr())
		})
		v.Require(private, fmt.Sprintf("%s.allow_private[%d]", path, i), "%s is not a private network; write parts of 10.0.0.0/8, 172.16.0.0/12, "+
			"192.168.0.0/16, 100.64.0.0/10, 127.0.0.0/8, fc00::/7 or ::1/128 (public addresses need no entry)", network)
	}
	if e.Proxy != "" {
		if text := proxyProblem(e.Proxy, e); text != "" {
			v.Require(false, path+".proxy", "%s", text)
		}
	}
	return v
}

// proxyProblem says what is wrong with a proxy's URL; empty: nothing. It repeats nothing of it: it
// may hold a password.
func proxyProblem(raw string, e Egress) string {
	const example = "write one such as http://proxy.internal:3128"
	u, err := url.Parse(raw)
	switch {
	case err != nil, u.Host == "":
		return "is not a URL; " + example
	case u.Scheme != "http":
		return "does not begin with http://, the only way of speaking to a proxy that is supported; " + example
	case u.Port() == "":
		return "has no port; " + example
	case strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		return "has something behind the port; " + example
	}
	u.User, u.Path = nil, "/"
	if text := urlProblem(u.String(), e); text != "" {
		return text
	}
	return ""
}

// SameEgress reports whether connections to a destination may go to the same places.
func (d Destination) SameEgress(next Destination) bool {
	a, b := d.Wire.egress, next.Wire.egress
	return a.Proxy == b.Proxy && (a.AllowPrivate == nil) == (b.AllowPrivate == nil) && slices.Equal(a.AllowPrivate, b.AllowPrivate)
}
