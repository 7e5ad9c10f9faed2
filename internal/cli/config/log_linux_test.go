package config

import (
	"bytes"
	"os"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestLogFormat(t *testing.T) {
	t.Parallel()
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	testkit.Must(t, err)
	defer terminal.Close()
	for _, test := range []struct {
		format string
		out    *os.File
		json   bool
	}{{"auto", terminal, false}, {"json", terminal, true}, {"auto", nil, true}, {"console", nil, false}} {
		inv := &cli.Invocation{Program: cli.Program{Stderr: new(bytes.Buffer)}}
		if test.out != nil {
			inv.Stderr = test.out
		}
		if _, got := logWriter(inv, test.format).(output.JSONWriter); got != test.json {
			t.Errorf("%s, terminal %v: JSON is %v", test.format, test.out != nil, got)
		}
	}
}
