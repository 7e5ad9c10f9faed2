package inbox_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// abandon leaves an event as a process leaves it that is killed at work.
func (p *inboxProcess) abandon(key string) {
	p.T.Helper()
	p.MustExec(`UPDATE inbox_events SET processing_state = 'processing', claim = claim + 1, claimed_by = 'the dead', claimed_at = now() - interval '1 minute'
		WHERE idempotency_key = $1`, key)
}

func TestInboxRescuesWhatDeadWorkersHad(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{PollInterval: never})
	p.record("1", ordered("o", 1))
	p.record("2", ordered("o", 2))
	p.record("free")
	p.abandon("1")
	p.abandon("free")
	p.run()
	p.Await("SELECT count(*) = 3 FROM inbox_events WHERE processing_state = 'succeeded'")
	p.wantState("1", inbox.StateSucceeded, 1) // being rescued is no attempt
	p.wantInOrder()
	testkit.Contains(t, "the observer was not called", p.Logged.String(), "gave back events whose worker had died")
}

// The dead are looked for also while there is always more to claim.
func TestInboxRescuesWhileItIsBusy(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	another := func(key string) string {
		return `INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, payload, request_headers, next_attempt_at)
			SELECT 'test', 'outbox', ` + key + `, 't', 'pending', '{}', '{}', now()`
	}
	p := newInbox(t, inbox.Config{Workers: 11, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		if event.IdempotencyKey == "dead" {
			return nil
		}
		_, err := consumer.Tx(ctx).Exec(ctx, another("gen_random_uuid()::text"))
		return err
	}})
	p.record("dead")
	p.abandon("dead")
	p.MustExec(another("i::text") + " FROM generate_series(1, 50) i")
	for range 10 { // its pool is the application's, too: few can begin at once, and many workers are free
		conn, err := p.own.Acquire(t.Context())
		pgtest.Must(t, err)
		t.Cleanup(conn.Release)
	}
	p.run()
	p.awaitState("dead", inbox.StateSucceeded)
}

// However long a handler takes, its own process and others see by its lock that it lives. The lock
// outlives no transaction: what a vanished worker had is free as soon as the server has noticed.
func TestInboxDoesNotRescueTheLiving(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle, Workers: 1}) // it has no worker for the other
	p.run()
	p.record("slow")
	g.wantEntered(t, "slow")
	other := p.again(inbox.Config{})
	for _, key := range []string{"vanished", "dead"} {
		other.record(key)
		other.abandon(key)
	}
	release := p.Hold(func(tx pgx.Tx) error { // a worker that the server still believes in
		_, err := tx.Exec(t.Context(), "SELECT FROM inbox_events WHERE idempotency_key = 'vanished' FOR UPDATE")
		return err
	})
	other.run()
	// The same looks that rescue the dead one have passed by the living one.
	other.awaitState("dead", inbox.StateSucceeded)
	p.wantState("slow", inbox.StateProcessing, 0)
	p.wantState("vanished", inbox.StateProcessing, 0)
	release()
	other.awaitState("vanished", inbox.StateSucceeded)
	if n := p.Count("SELECT claim FROM inbox_events WHERE idempotency_key = 'slow'"); n != 1 {
		t.Errorf("the event was claimed %d times", n)
	}
	g.through <- nil
	p.wantWorked("slow", consumer.ResultProcessed)
	p.WantRows("slow", 1, 1)
}

// A handler that has been cut off keeps its worker until it returns, also when the same process
// works its event again.
func TestInboxCountsWorkersThatAreCutOff(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle, Workers: 2})
	p.run()
	p.record("k")
	g.wantEntered(t, "k")
	p.MustExec(`SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'`)
	conn, err := p.Pool.Acquire(t.Context())
	pgtest.Must(t, err)
	t.Cleanup(conn.Release)
	pgtest.Exec(t, conn, "LISTEN inbox_wake")
	p.MustExec("UPDATE inbox_events SET processing_state = 'pending'") // as another process rescues it
	g.wantEntered(t, "k")
	p.record("third")
	// When it tells others that it has more to do than workers, it has not taken more than it has
	// workers.
	if _, err := conn.Conn().WaitForNotification(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.wantState("third", inbox.StatePending, 0)
	for range 3 {
		g.through <- nil
	}
	p.awaitState("k", inbox.StateSucceeded)
	p.awaitState("third", inbox.StateSucceeded)
	p.wantState("k", inbox.StateSucceeded, 1) // the loss of the connection costs no attempt
	p.WantRows("k", 1, 1)
}

// A worker that begins after its event was given to another, or was finished, does nothing: the
// fence is in the way.
func TestInboxFencesOffLateWorkers(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle, Workers: 1})
	p.run()
	p.record("first")
	g.wantEntered(t, "first")
	p.record("second")
	// Between claim and begin another worker works the second: the trigger stands for a claimer
	// that was slow.
	p.MustExec(`CREATE FUNCTION taken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		UPDATE inbox_events SET claim = claim + 1 WHERE idempotency_key = NEW.idempotency_key; RETURN NULL; END $$`)
	p.MustExec(`CREATE TRIGGER taken AFTER UPDATE OF processing_state ON inbox_events FOR EACH ROW
		WHEN (NEW.processing_state = 'processing' AND OLD.processing_state = 'pending') EXECUTE FUNCTION taken()`)
	g.through <- nil
	p.wantWorked("first", consumer.ResultProcessed)
	p.Await("SELECT claim = 2 FROM inbox_events WHERE idempotency_key = 'second'")
	p.MustExec("DROP TRIGGER taken ON inbox_events")
	// It is rescued like anything that no worker works, and then worked.
	g.wantEntered(t, "second")
	g.through <- nil
	p.wantWorked("second", consumer.ResultProcessed)
	p.WantRows("second", 1, 1)
	testkit.Equal(t, "claim", p.Count("SELECT claim FROM inbox_events WHERE idempotency_key = 'second'"), 3)
}

func TestInboxGivesUpWhatKillsItsWorkers(t *testing.T) {
	t.Parallel()
	for _, onFailure := range []inbox.OnFailure{inbox.FailureBlocks, inbox.FailureSkips} {
		t.Run(string(onFailure), func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{OnFailure: onFailure})
			p.record("1", ordered("o", 1))
			p.record("2", ordered("o", 2))
			p.abandon("1")
			p.MustExec("UPDATE inbox_events SET interruptions = 19 WHERE idempotency_key = '1'")
			p.run()
			p.awaitState("1", inbox.StateFailed)
			var text string
			if err := p.Pool.QueryRow(t.Context(), "SELECT last_error FROM inbox_events WHERE idempotency_key = '1'").Scan(&text); err != nil ||
				!strings.Contains(text, "its worker died") {
				t.Errorf("last_error %q, %v", text, err)
			}
			if onFailure == inbox.FailureSkips {
				p.awaitState("2", inbox.StateSucceeded)
				return
			}
			p.wantState("2", inbox.StatePending, 0)
			// A replay begins to count again.
			if n, err := p.replay(inboxops.Selection{Key: "1"}); n != 1 || err != nil {
				t.Fatalf("replayed %d, %v", n, err)
			}
			p.awaitState("2", inbox.StateSucceeded)
		})
	}
}

func TestInboxStopsGracefully(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle, Workers: 2})
	p.run()
	for i := range 3 {
		p.record(fmt.Sprint(i))
	}
	<-g.entered
	<-g.entered
	stopped := make(chan error, 1)
	go func() { stopped <- p.stop() }()
	p.Post("late", "{}") // recording continues
	g.through <- nil
	g.through <- nil
	if err := <-stopped; err != nil {
		t.Errorf("Run returned %v", err)
	}
	p.wantState("2", inbox.StatePending, 0)
	p.wantState("late", inbox.StatePending, 0)
	testkit.Equal(t, "events succeeded", p.Count("SELECT count(*) FROM inbox_events WHERE processing_state = 'succeeded' AND attempts = 1"), 2)
	p.run() // again
	g.through <- nil
	g.through <- nil
	p.Await("SELECT count(*) = 4 FROM inbox_events WHERE processing_state = 'succeeded'")
}

// A handler that outlasts the drain is cut off, and its event is given back without an attempt.
func TestInboxStopIsBounded(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle, DrainTimeout: 10 * time.Millisecond})
	p.run()
	p.record("k")
	g.wantEntered(t, "k")
	if err := p.stop(); err != nil {
		t.Errorf("Run returned %v", err)
	}
	if log := p.Logged.String(); !strings.Contains(log, "gave an event back whose handler was cut off") || strings.Contains(log, "could not") {
		t.Errorf("logged %s", log)
	}
	p.wantState("k", inbox.StatePending, 0)
	p.WantRows("k", 0, 1)
	next := p.again(inbox.Config{})
	next.run()
	next.wantWorked("k", consumer.ResultProcessed)
	next.wantState("k", inbox.StateSucceeded, 1)
}

// A handler that does not even heed its context does not keep Run from returning, and its work is
// not committed.
func TestInboxRunReturnsAlthoughAHandlerDoesNot(t *testing.T) {
	t.Parallel()
	entered, leave := make(chan struct{}), make(chan struct{})
	recorder := newInbox(t, inbox.Config{})
	recorder.record("k")
	p := recorder.again(inbox.Config{
		DrainTimeout: 10 * time.Millisecond,
		Config:       consumer.Config{Limits: consumer.Limits{CommitTimeout: 3 * time.Second}},
		Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
			err := receivertest.EffectOf(ctx, event.IdempotencyKey)
			close(entered)
			<-leave
			return err
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- p.inbox.Run(ctx) }()
	<-entered
	cancel()
	testkit.ErrorContains(t, "Run returned", <-result, "1 handlers have not returned")
	p.wantState("k", inbox.StateProcessing, 0)
	close(leave)
	p.Await("SELECT processing_state <> 'processing' FROM inbox_events")
}
