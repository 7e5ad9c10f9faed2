package main

import (
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
)

func TestReplayOnATerminal(t *testing.T) {
	t.Parallel()
	for answer, test := range map[string]struct {
		sqlState, replayed int
		rest               string
	}{
		"yes\n": {0, 3, `"done":3`},
		"n\n":   {cli.ExitUsage, 0, "outbox-relay: nothing was replayed\n"},
	} {
		t.Run(strings.TrimSpace(answer), func(t *testing.T) {
			t.Parallel()
			env, dsn := failedOutbox(t, 3)
			person, program := terminal(t)
			stdout, stderr := &buffer{}, &awaited{written: make(chan struct{}, 1)}
			code := make(chan int, 1)
			go func() {
				m := Main{Env: env, Stdin: program, Stdout: stdout, Stderr: stderr}
				code <- m.Run([]string{"replay", "--destination=logistics"})
			}()
			stderr.wait(t, "3 deliveries to replay:\n  1  paid  k1  logistics", code)
			stderr.wait(t, "replay 3 deliveries.\nContinue? [y/N] ", code)
			if _, err := person.WriteString(answer); err != nil {
				t.Fatal(err)
			}
			if got := <-code; got != test.sqlState || !strings.Contains(stderr.String(), test.rest) {
				t.Errorf("exit code %d: %s", got, stderr)
			}
			if n := query[int](t, open(t, dsn), pending); n != test.replayed {
				t.Errorf("%d were replayed", n)
			}
		})
	}
}

func TestInboxIgnoreOnATerminal(t *testing.T) {
	t.Parallel()
	for answer, test := range map[string]struct {
		sqlState, ignored int
		rest              string
	}{
		"yes\n": {0, 3, `"done":3`},
		"n\n":   {cli.ExitUsage, 0, "outbox-relay: nothing was ignored\n"},
	} {
		t.Run(strings.TrimSpace(answer), func(t *testing.T) {
			t.Parallel()
			env, dsn := failedInbox(t, 3)
			person, program := terminal(t)
			stdout, stderr := &buffer{}, &awaited{written: make(chan struct{}, 1)}
			code := make(chan int, 1)
			go func() {
				m := Main{Env: env, Stdin: program, Stdout: stdout, Stderr: stderr}
				code <- m.Run([]string{"inbox", "ignore", "--type=paid"})
			}()
			stderr.wait(t, "3 events to ignore (3 failed):\n  1  shipping  finance  paid  k1  failed", code)
			stderr.wait(t, "ignore 3 events.\nContinue? [y/N] ", code)
			// What comes while the person thinks is not what they were asked about.
			execute(t, open(t, dsn), "INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, inbox_id) VALUES ('shipping', 'finance', 'new', 'paid', 'failed', 4)")
			if _, err := person.WriteString(answer); err != nil {
				t.Fatal(err)
			}
			if got := <-code; got != test.sqlState || !strings.Contains(stderr.String(), test.rest) {
				t.Errorf("exit code %d: %s", got, stderr)
			}
			if n := query[int](t, open(t, dsn), "SELECT count(*) FROM inbox_events WHERE processing_state = 'ignored'"); n != test.ignored {
				t.Errorf("%d were ignored", n)
			}
		})
	}
}
