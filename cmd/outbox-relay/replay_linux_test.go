package main

import (
	"strings"
	"testing"
)

func TestReplayOnATerminal(t *testing.T) {
	t.Parallel()
	for answer, test := range map[string]struct {
		code, replayed int
		rest           string
	}{
		"yes\n": {0, 3, `"done":3`},
		"n\n":   {exitUsage, 0, "outbox-relay: nothing was replayed\n"},
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
			if got := <-code; got != test.code || !strings.Contains(stderr.String(), test.rest) {
				t.Errorf("exit code %d: %s", got, stderr)
			}
			if n := query[int](t, open(t, dsn), pending); n != test.replayed {
				t.Errorf("%d were replayed", n)
			}
		})
	}
}
