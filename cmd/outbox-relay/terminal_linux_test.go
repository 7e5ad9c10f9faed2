package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// terminal returns the two ends of a pseudo terminal: where a person types, and what the program
// sees.
func terminal(t *testing.T) (person, program *os.File) {
	t.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = person.Close() })
	raw, err := person.SyscallConn()
	pgtest.Must(t, err)
	var number int
	var ioctlErr error
	err = raw.Control(func(fd uintptr) {
		if ioctlErr = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); ioctlErr == nil {
			number, ioctlErr = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	})
	if err != nil || ioctlErr != nil {
		t.Fatal(err, ioctlErr)
	}
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = program.Close() })
	return person, program
}

func TestMigrateDownOnATerminal(t *testing.T) {
	t.Parallel()
	latest := migrations.Outbox.Latest()
	for name, test := range map[string]struct {
		answer   string // empty: a signal instead
		sqlState int
		stderr   string
	}{
		"yes":       {answer: "y\n"},
		"no":        {answer: "\n", sqlState: cli.ExitUsage, stderr: "outbox-relay: nothing was reverted\n"},
		"interrupt": {sqlState: cli.ExitInterrupted, stderr: "outbox-relay: interrupted\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.New(t, migrations.Outbox)
			person, program := terminal(t)
			stdout, stderr := &buffer{}, &awaited{written: make(chan struct{}, 1)}
			signals, code := make(chan os.Signal, 1), make(chan int, 1)
			go func() {
				m := Main{Env: []string{"OUTBOX_DATABASE_URL=" + dsn}, Stdin: program, Stdout: stdout, Stderr: stderr, Signals: signals}
				code <- m.Run([]string{"migrate", "down"})
			}()
			stderr.wait(t, "reverting 1 migration of outbox in postgres://", code)
			stderr.wait(t, "Continue? [y/N] ", code)
			if test.answer == "" {
				signals <- syscall.SIGINT
			} else if _, err := person.WriteString(test.answer); err != nil {
				t.Fatal(err)
			}
			testkit.Equal(t, "exit code", <-code, test.sqlState)
			if _, rest, _ := strings.Cut(stderr.String(), "[y/N] "); rest != test.stderr {
				t.Errorf("stderr ends with %q, want %q", rest, test.stderr)
			}
			want := latest
			if test.sqlState == 0 {
				want--
			}
			testkit.Equal(t, "the database has version", query[int64](t, open(t, dsn), "SELECT max(version_id) FROM outbox_schema_version"), want)
		})
	}
}

// On a terminal, the line for the audit appears only where log.format asks for it.
func TestAuditOnATerminal(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	for _, format := range []string{"auto", "json"} {
		person, program := terminal(t)
		stdout := &buffer{}
		m := Main{Env: []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_LOG_FORMAT=" + format}, Stdin: program, Stdout: stdout, Stderr: program}
		if code := m.Run([]string{"send", "invoice.paid"}); code != 0 {
			t.Fatalf("exit code %d, %q", code, stdout)
		}
		_, _ = program.WriteString("the end\n")
		if seen := readUntil(t, person, "the end"); strings.Contains(seen, `"action":"send"`) != (format == "json") || format == "auto" && seen != "the end\r\n" {
			t.Errorf("%s: the terminal shows %q", format, seen)
		}
	}
}

// readUntil returns what a terminal shows, up to a text.
func readUntil(t *testing.T, person *os.File, text string) string {
	t.Helper()
	var seen strings.Builder
	chunk := make([]byte, 4096)
	for !strings.Contains(seen.String(), text) {
		n, err := person.Read(chunk)
		pgtest.Must(t, err)
		seen.Write(chunk[:n])
	}
	return seen.String()
}

// On a terminal one line changes, and is gone at the end.
func TestArchiveProgress(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	settled(t, db, 1, 2000)
	person, program := terminal(t)
	code := make(chan int, 1)
	go func() {
		m := Main{Env: []string{"OUTBOX_DATABASE_URL=" + dsn}, Stdin: program, Stdout: &buffer{}, Stderr: program}
		code <- m.Run([]string{"archive", "run", "--batch=50", "--yes"})
		_, _ = program.WriteString("the end\n")
	}()
	seen := readUntil(t, person, "the end")
	if got := <-code; got != 0 || !regexp.MustCompile(`\r\x1b\[K[0-9]+ events archived, .*\r\x1b\[Kthe end`).MatchString(seen) {
		t.Errorf("exit code %d, %q", got, seen)
	}
}

// On a terminal each finding is one line of its width, also with the longest key.
func TestReconcileOnATerminal(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	c.receiver.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('shop', 'billing', repeat('k', 255), 'succeeded')`)
	person, program := terminal(t)
	pgtest.Must(t, unix.IoctlSetWinsize(int(program.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}))
	m := Main{Env: c.env, Stdin: program, Stdout: program, Stderr: &buffer{}}
	if code := m.Run([]string{"reconcile", "--url=" + c.url, "--settle=1ms"}); code != cli.ExitFound {
		t.Fatalf("exit code %d", code)
	}
	_, _ = program.WriteString("the end\n")
	_, table, _ := strings.Cut(readUntil(t, person, "the end"), "Effect without event: 1")
	rows := 0
	for line := range strings.SplitSeq(table, "\r\n") {
		if rows++; utf8.RuneCountInString(line) > 80 {
			t.Errorf("%d columns: %q", utf8.RuneCountInString(line), line)
		}
	}
	if rows < 4 || !strings.Contains(table, "kkk…") {
		t.Errorf("%q", table)
	}
}

// A bulk command on a terminal shows what it is about to change, and does what the answer says.
func TestBulkCommandsOnATerminal(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		command        string
		failed         func(t *testing.T, n int) (env []string, dsn string)
		says, asks, no string
		meanwhile      string // comes while the person thinks, and is not what they were asked about
		changed        string // counts
	}{
		{
			"replay --destination=logistics", failedOutbox, "3 deliveries to replay:\n  1  paid  k1  logistics", "replay 3 deliveries.\nContinue? [y/N] ",
			"outbox-relay: nothing was replayed\n", "SELECT 1", pending,
		},
		{
			"inbox ignore --type=paid", failedInbox, "3 events to ignore (3 failed):\n  1  shipping  finance  paid  k1  failed", "ignore 3 events.\nContinue? [y/N] ",
			"outbox-relay: nothing was ignored\n",
			"INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, inbox_id) VALUES ('shipping', 'finance', 'new', 'paid', 'failed', 4)",
			"SELECT count(*) FROM inbox_events WHERE processing_state = 'ignored'",
		},
	} {
		for answer, want := range map[string]struct {
			code, changed int
			rest          string
		}{"yes\n": {0, 3, `"done":3`}, "n\n": {cli.ExitUsage, 0, test.no}} {
			t.Run(test.command+" "+strings.TrimSpace(answer), func(t *testing.T) {
				t.Parallel()
				env, dsn := test.failed(t, 3)
				person, program := terminal(t)
				stdout, stderr := &buffer{}, &awaited{written: make(chan struct{}, 1)}
				code := make(chan int, 1)
				go func() {
					m := Main{Env: env, Stdin: program, Stdout: stdout, Stderr: stderr}
					code <- m.Run(strings.Fields(test.command))
				}()
				stderr.wait(t, test.says, code)
				stderr.wait(t, test.asks, code)
				execute(t, open(t, dsn), test.meanwhile)
				_, err := person.WriteString(answer)
				pgtest.Must(t, err)
				testkit.Equal(t, "exit code", <-code, want.code)
				testkit.Contains(t, "stderr", stderr.String(), want.rest)
				testkit.Equal(t, "changed", query[int](t, open(t, dsn), test.changed), want.changed)
			})
		}
	}
}
