package localserver

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
)

// Ports below those that Linux gives to connections (32768 and up). One from there may be taken by
// any connection before the server listens on it, or by the very dial that waits for the server: a
// TCP connection to a free port can connect to itself.
const firstPort, ports, portTries = 20_000, 12_000, 1000

// FreePorts returns ports of the loopback address that nothing listens on now.
func FreePorts(n int) ([]string, error) {
	var found []string
	var failed error
	for range portTries {
		if len(found) == n {
			return found, nil
		}
		port := strconv.Itoa(firstPort + rand.IntN(ports)) //nolint:gosec // G404: any free port serves
		listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", port))
		switch {
		case err != nil:
			failed = err
			continue
		case !slices.Contains(found, port):
			found = append(found, port)
		}
		if err := listener.Close(); err != nil {
			return nil, fmt.Errorf("free a port: %w", err)
		}
	}
	return nil, errors.Join(errors.New("no free port was found"), failed)
}
