package chaos

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// settled adds events that are ripe for the archive: 30 of them, so that it takes more than one
// batch of 10.
const settled = `
WITH event AS (
    INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at, xid)
    SELECT 'sale.made', '{}', 'old-' || i, now() - interval '40 days', now() - interval '40 days', '2' FROM generate_series(1, 30) i RETURNING id
)
INSERT INTO outbox_delivery (event_id, destination, status, delivered_at, next_attempt_at, attempts)
SELECT id, 'default', 'delivered', now() - interval '35 days', now() - interval '35 days', 1 FROM event`

// notArchived counts events that are not in the archive, or not once, or not with their delivery.
const notArchived = `
SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM outbox_delivery) + abs(30 - count(*)) + 30 - count(DISTINCT idempotency_key)
    + count(*) FILTER (WHERE jsonb_array_length(deliveries) <> 1) FROM outbox_archive`

// broken is a finding of doctor about what migrations make.
var broken = regexp.MustCompile(`^\w+ +(schema|indexes|constraints|triggers|functions): `)

// Whatever message of a migration or of the archive is lost with the process or with the
// connection, or its answer: the command does the rest when it runs again.
func TestCommandsMeetTheirFateAtEveryMessage(t *testing.T) {
	for _, command := range []string{"migrate up", "archive run --batch 10 --yes"} {
		for _, fate := range []string{killed, cutOff} {
			for _, at := range []stageOfMessage{unsent, sent} {
				t.Run(strings.Join([]string{strings.Fields(command)[0], fate, string(at)}, "/"), func(t *testing.T) {
					testsize.OneIn(t, 9, "migrate/killed/sent", "archive/cut-off/sent")
					t.Parallel()
					s := newStage(t, 1, 0)
					rounds := 0
					stride := testsize.Of(1, 97)
					for n := 1; s.interrupts(strings.Fields(command), fate, int64(n), at); n += stride {
						rounds++
					}
					if t.Logf("%d times %s", rounds, fate); rounds == 0 {
						t.Error("nothing was interrupted")
					}
				})
			}
		}
	}
}

// interrupts kills a command at a message, or cuts it off, runs it again, and reports whether there
// was that message.
func (s *stage) interrupts(command []string, fate string, n int64, at stageOfMessage) (reached bool) {
	s.t.Helper()
	name := fmt.Sprintf("database_%d", n)
	s.must(s.Server.CreateDatabase(s.Ctx, name, ""))
	run := func(dsn string, args ...string) process.Command {
		return process.Command{Argv: append([]string{s.Relay}, args...), Env: []string{
			"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=http://" + s.wire.addr, "OUTBOX_SIGNING_SECRET=" + s.Secret, "OUTBOX_DATABASE_ALLOW_SUPERUSER=true",
		}}
	}
	isArchive := command[0] == "archive"
	if isArchive {
		s.must(process.Run(s.Ctx, run(s.Server.DSN(name), "migrate", "up")))
		_, err := s.within(name, settled)
		s.must(err)
	}
	l, dsn := linkTo(s.t, s.Server.DSN(name))
	defer l.close()
	met, goOn := make(chan struct{}), make(chan bool)
	defer close(goOn)
	l.dooms(&doom{n: n, at: at, meet: func([]byte) bool { close(met); return <-goOn }})
	p, err := process.Start(run(dsn, command...))
	s.must(err)
	defer p.Kill()
	select {
	case <-met:
		if fate == killed {
			p.Kill()
		}
		goOn <- false
	case <-p.Ended:
		s.must(p.Failure())
	}
	<-p.Ended
	s.must(process.Run(s.Ctx, run(s.Server.DSN(name), command...)))
	if isArchive {
		if wrong, err := s.within(name, notArchived); err != nil || wrong != 0 {
			s.t.Errorf("message %d: %d events are lost, or twice, or not in the archive: %v", n, wrong, err)
		}
		return l.sent.Load() >= n
	}
	doctor, said := run(s.Server.DSN(name), "doctor"), 0
	doctor.Stdout = func(line string) {
		said++
		if broken.MatchString(line) {
			s.t.Errorf("message %d: %s", n, line)
		}
	}
	if _ = process.Run(s.Ctx, doctor); said == 0 { // it fails: no relay is running
		s.t.Errorf("message %d: doctor said nothing", n)
	}
	return l.sent.Load() >= n
}

// within runs a statement in a database and returns the number that it yields, or 0.
func (s *stage) within(database, statement string) (n int, err error) {
	conn, err := pgx.Connect(s.Ctx, s.Server.DSN(database))
	if err != nil {
		return 0, err
	}
	defer conn.Close(s.Ctx)
	if err := conn.QueryRow(s.Ctx, statement).Scan(&n); err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return 0, err
	}
	return n, nil
}
