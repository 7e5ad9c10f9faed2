package localserver

import (
	"net"
	"slices"
	"testing"
)

// Connections come from 32768 and up, and take none of these ports meanwhile.
func TestFreePorts(t *testing.T) {
	t.Parallel()
	found, err := FreePorts(20)
	if err != nil || len(found) != 20 {
		t.Fatal(found, err)
	}
	taken := 0
	for i, port := range found {
		if slices.Contains(found[:i], port) || port >= "32768" || len(port) != 5 {
			t.Errorf("port %s among %v", port, found)
		}
		l, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err != nil { // by the tests of another package, which run meanwhile
			t.Log(err)
			taken++
			continue
		}
		l.Close()
	}
	if taken > 3 {
		t.Errorf("%d of %d ports are not free", taken, len(found))
	}
}
