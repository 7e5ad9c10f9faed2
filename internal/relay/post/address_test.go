package post

import (
	"net/netip"
	"testing"
)

// Destinations are named in the configuration: this host and private networks are theirs to use, in
// any spelling.
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
		if err := (Egress{}).Control(t.Context(), network, address, nil); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
	for _, odd := range [][2]string{{"udp4", "8.8.8.8:53"}, {"unix", "/var/run/x.sock"}, {"tcp4", "nonsense"}, {"tcp", "127.0.0.1:80"}} {
		if err := (Egress{}).Control(t.Context(), odd[0], odd[1], nil); err == nil {
			t.Errorf("%s is dialled", odd)
		}
	}
}
