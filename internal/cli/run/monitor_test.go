package run

import (
	"bytes"
	"net"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
)

// Two relays on one host: the second runs without metrics at the default address.
func TestMonitorBesideAnother(t *testing.T) {
	t.Parallel()
	if first, err := net.Listen("tcp", "127.0.0.1:9464"); err == nil { // otherwise it is taken already, be it by another test
		defer first.Close()
	}
	env := []string{"OUTBOX_DATABASE_URL=postgres://u:p@localhost/db", "OUTBOX_DESTINATION_URL=https://shop.test/"}
	c := config.Load(&cli.Invocation{Program: cli.Program{Env: env}})
	var log bytes.Buffer
	c.Log = zerolog.New(&log)
	m, err := openMonitor(t.Context(), c, "test")
	if m.server != nil || err != nil || !strings.Contains(log.String(), "the default address cannot be opened, so the relay runs without it") {
		t.Errorf("%v, %v, %s", m, err, log.String())
	}
	m.start(t.Context(), nil)()
}
