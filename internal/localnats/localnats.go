// Package localnats runs NATS servers with JetStream for tests and demonstrations: real processes
// on the loopback address, alone or as a cluster, that can be killed and started again with what
// they had written.
package localnats

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/localserver"
)

// Version is of the server that make builds into bin.
const Version = "v2.15.2"

// A Cluster is one server or several. Its methods are for one goroutine at a time.
type Cluster struct {
	servers []*localserver.Server
	clients []string // ports
}

// Start runs a number of servers, 1 or 3 as a rule, and returns when all accept connections; a
// cluster needs a moment more to elect a leader. config is appended to the configuration of each
// server. ctx bounds starting only.
func Start(ctx context.Context, program string, servers int, config string) (*Cluster, error) {
	ports, err := localserver.FreePorts(2 * servers)
	if err != nil {
		return nil, err
	}
	c := &Cluster{clients: ports[:servers]}
	var routes strings.Builder
	for _, port := range ports[servers:] {
		fmt.Fprintf(&routes, "%q, ", "nats://127.0.0.1:"+port)
	}
	for i := range servers {
		text := fmt.Sprintf("server_name: n%d\nlisten: 127.0.0.1:%s\nmax_payload: 8MB\n%s\n", i+1, ports[i], config)
		if servers > 1 {
			text += fmt.Sprintf("cluster { name: outbox, listen: 127.0.0.1:%s, routes: [%s] }\n", ports[servers+i], routes.String())
		}
		server, err := localserver.StartAt(ctx, ports[i], func(dir string) []string {
			file := filepath.Join(dir, "nats.conf")
			text += fmt.Sprintf("jetstream { store_dir: %q }\n", dir)
			_ = os.WriteFile(file, []byte(text), 0o600) // a server without it says so
			return []string{program, "-c", file}
		})
		if err != nil {
			return nil, errors.Join(err, c.Stop())
		}
		c.servers = append(c.servers, server)
	}
	return c, nil
}

// URL returns what a client connects to: all servers.
func (c *Cluster) URL() string {
	urls := make([]string, len(c.clients))
	for i, port := range c.clients {
		urls[i] = "nats://127.0.0.1:" + port
	}
	return strings.Join(urls, ",")
}

// Size returns how many servers there are, running or not.
func (c *Cluster) Size() int { return len(c.servers) }

// Kill ends one server as a crash would: n1 is 0. It returns when the process is gone.
func (c *Cluster) Kill(i int) { c.servers[i].Kill() }

// Restart starts a server that was killed.
func (c *Cluster) Restart(ctx context.Context, i int) error { return c.servers[i].Restart(ctx) }

// Stop ends all servers and removes what they wrote.
func (c *Cluster) Stop() error {
	var errs []error
	for _, server := range c.servers {
		errs = append(errs, server.Stop())
	}
	return errors.Join(errs...)
}

// Find returns the path of the program: in PATH, or in bin of the repository whose root is named.
func Find(root string) (string, error) {
	if program, err := exec.LookPath("nats-server"); err == nil {
		return program, nil
	}
	program, err := filepath.Abs(filepath.Join(root, "bin", "nats-server-"+Version))
	if err != nil {
		return "", fmt.Errorf("find the repository: %w", err)
	}
	if _, err := os.Stat(program); err != nil {
		return "", fmt.Errorf("no NATS server: make nats-server builds one: %w", err)
	}
	return program, nil
}
