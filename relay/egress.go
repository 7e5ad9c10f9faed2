package relay

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"code.dny.dev/ssrf"
)

// guardedDialer returns a dialer that decides on every address immediately before it connects. Whatever the relay dials
// over HTTP, it dials with one of these.
func guardedDialer(timeout time.Duration) *net.Dialer {
	return &net.Dialer{
		Timeout:        timeout,
		KeepAlive:      15 * time.Second,
		ControlContext: guardDial,
	}
}

// Destinations are named in the configuration, so private networks and this host are theirs to use. Everything else
// that is not a public address is refused, above all the link-local ones under which clouds hand out credentials.
var guardian = ssrf.New(
	ssrf.WithAnyPort(),
	ssrf.WithAllowedV4Prefixes(prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8")...),
	ssrf.WithAllowedV6Prefixes(prefixes("fc00::/7", "::1/128")...),
)

// Metadata services inside the private ranges: AWS (IPv6), Alibaba Cloud.
var metadata = prefixes("fd00:ec2::/32", "100.100.100.200/32")

// guardDial decides on the address that a name has resolved to, immediately before the connection is made: a check of
// the URL's text would miss names that resolve to forbidden addresses, and other spellings of them.
func guardDial(_ context.Context, network, address string, conn syscall.RawConn) error {
	if addrPort, err := netip.ParseAddrPort(address); err == nil {
		if err := guardAddress(addrPort.Addr()); err != nil {
			return err
		}
	}
	return guardian.Safe(network, address, conn)
}

// guardAddress refuses the addresses that no destination may have.
func guardAddress(address netip.Addr) error {
	for _, prefix := range metadata {
		if prefix.Contains(address.Unmap()) {
			return fmt.Errorf("%w: %s is a cloud's metadata service", ssrf.ErrProhibitedIP, address)
		}
	}
	return guardian.SafeAddr(address.Unmap())
}

func prefixes(list ...string) []netip.Prefix {
	parsed := make([]netip.Prefix, len(list))
	for i, s := range list {
		parsed[i] = netip.MustParsePrefix(s)
	}
	return parsed
}
