package inbox_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// repeatableRead gives later connections to the test's database another level than the one most
// databases have.
const repeatableRead = `DO $$ BEGIN
	EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = %L', current_database(), 'repeatable read');
END $$`

// gate holds handlers until they are let through, one by one.
type gate struct {
	entered chan string // keys
	through chan error  // what the handler returns
}

func newGate() *gate { return &gate{make(chan string, 1000), make(chan error)} }

func (g *gate) handle(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
	if err := receivertest.EffectOf(ctx, event.IdempotencyKey); err != nil {
		return err
	}
	g.entered <- event.IdempotencyKey
	select {
	case err := <-g.through:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g *gate) wantEntered(t *testing.T, key string) {
	t.Helper()
	if got := <-g.entered; got != key {
		t.Fatalf("%s is worked, want %s", got, key)
	}
}

// An event that has waited for its turn is as old as it is: those of its key do not queue behind
// the whole backlog one after the other.
func TestInboxKeysKeepTheirPlaceInTheQueue(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{Workers: 1, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		return receivertest.EffectOf(ctx, event.IdempotencyKey)
	}})
	for i := range 3 {
		p.record(fmt.Sprintf("keyed-%d", i), ordered("customer-7", i+1))
	}
	for i := range 3 {
		p.record(fmt.Sprintf("free-%d", i))
	}
	p.run()
	for _, key := range []string{"keyed-0", "keyed-1", "keyed-2", "free-0", "free-1", "free-2"} {
		p.wantWorked(key, consumer.ResultProcessed)
	}
}

// Many events of few keys, with failures at random, through two processes that record and work at
// once: at no level of isolation does one of a key overtake another, and nothing is left waiting.
func TestInboxKeepsTheOrderOfEveryKey(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]string{"read committed": "SELECT 1", "repeatable read": repeatableRead} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			keys, each := testsize.Of(8, 4), testsize.Of(25, 8)
			cfg := inbox.Config{
				Workers: 4, Schedule: []time.Duration{0}, PollInterval: 20 * time.Millisecond, MaxAttempts: 1000,
				Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
					if err := receivertest.EffectOf(ctx, event.IdempotencyKey); err != nil {
						return err
					}
					if rand.IntN(10) == 0 {
						return receivertest.ErrHandler
					}
					return nil
				},
			}
			first := newInbox(t, inbox.Config{})
			first.MustExec(prepare)
			p, other := first.again(cfg), first.again(cfg)
			p.run()
			other.run()
			var senders sync.WaitGroup
			for key := range keys {
				senders.Go(func() {
					for i := range each {
						at := []*inboxProcess{p, other}[rand.IntN(2)]
						r := at.NewRequest(fmt.Sprintf("%d-%02d", key, i), "{}", ordered(fmt.Sprint("key ", key), i+1))
						if got, err := at.Try(r); err != nil || got.Status != http.StatusAccepted {
							t.Errorf("%+v, %v", got, err)
						}
					}
				})
			}
			senders.Wait()
			p.Await("SELECT count(*) = $1 FROM inbox_events WHERE processing_state = 'succeeded'", keys*each)
			p.wantInOrder()
			if n, distinct := p.Count("SELECT count(*) FROM effect"), p.Count("SELECT count(DISTINCT key) FROM effect"); n != keys*each || distinct != n {
				t.Errorf("%d effects of %d events, want %d", n, distinct, keys*each)
			}
		})
	}
}

// Two of a key that are recorded at once must not both be due, and the one behind must not be
// forgotten when the one before it ends at that moment.
func TestInboxRecordsOneOfAKeyAtATime(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]string{"read committed": "SELECT 1", "repeatable read": repeatableRead} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{})
			p.MustExec(prepare)
			p = p.again(inbox.Config{})
			release := p.Hold(func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(hashtextextended(E'test\\noutbox\\no', 478660552050 # 'inbox_events'::regclass::oid::bigint))")
				return err
			})
			var posting sync.WaitGroup
			for i := range 2 {
				posting.Go(func() {
					r := p.NewRequest(fmt.Sprint(i), "{}", ordered("o", 1+i))
					if got, err := p.Try(r); err != nil || got.Status != http.StatusAccepted {
						t.Errorf("%+v, %v", got, err)
					}
				})
			}
			p.Await("SELECT count(*) = 2 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
			release()
			posting.Wait()
			testkit.Equal(t, "events due, of two of a key", p.Count("SELECT count(*) FROM inbox_events WHERE next_attempt_at IS NOT NULL"), 1)
		})
	}
}

func TestInboxKeyWaitsForItsRetry(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle, Schedule: []time.Duration{0}, PollInterval: 10 * time.Millisecond})
	p.run()
	for i := range 3 {
		p.record(fmt.Sprint(i), ordered("o", i+1))
	}
	p.record("free")
	seen := map[string]bool{<-g.entered: true, <-g.entered: true} // what has no key, or another one, does not wait
	if !seen["0"] || !seen["free"] {
		t.Fatalf("worked are %v, want 0 and free", seen)
	}
	g.through <- receivertest.ErrHandler
	g.through <- receivertest.ErrHandler
	for range 2 {
		if key := <-g.entered; key != "0" && key != "free" {
			t.Fatalf("%s is worked before its turn", key)
		}
	}
	g.through <- nil
	g.through <- nil
	g.wantEntered(t, "1")
	g.through <- nil
	g.wantEntered(t, "2")
	g.through <- nil
	p.Await("SELECT count(*) = 4 FROM inbox_events WHERE processing_state = 'succeeded'")
	p.wantInOrder()
}

func TestInboxFailureBlocksItsKey(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle})
	p.run()
	p.record("1", ordered("o", 1))
	g.wantEntered(t, "1")
	p.record("2", ordered("o", 2))
	g.through <- consumer.Permanent(receivertest.ErrHandler)
	p.wantWorked("1", consumer.ResultFailed)
	p.record("3", ordered("o", 3)) // recorded behind a failed one
	p.record("another key", ordered("q", 1))
	g.wantEntered(t, "another key")
	g.through <- nil
	p.wantWorked("another key", consumer.ResultProcessed)
	p.wantState("2", inbox.StatePending, 0)
	p.wantState("3", inbox.StatePending, 0)
	// Who replays what waits does not let it pass the one that failed.
	if n, err := p.replay(inboxops.Selection{Key: "2", States: []string{inboxops.Pending}}); n != 1 || err != nil {
		t.Fatalf("replayed %d, %v", n, err)
	}
	testkit.Equal(t, "events let go behind a failed one", p.Count("SELECT count(*) FROM inbox_events WHERE next_attempt_at IS NOT NULL"), 0)

	if n, err := p.replay(inboxops.Selection{Key: "1"}); n != 1 || err != nil {
		t.Fatalf("replayed %d, %v", n, err)
	}
	g.wantEntered(t, "1")
	g.through <- consumer.Permanent(receivertest.ErrHandler)
	p.wantWorked("1", consumer.ResultFailed)
	if n, err := p.ignore(inboxops.Selection{OrderingKey: "o", States: []string{inboxops.Failed}}); n != 1 || err != nil {
		t.Fatalf("ignored %d, %v", n, err)
	}
	for _, key := range []string{"2", "3"} {
		g.wantEntered(t, key)
		g.through <- nil
		p.wantWorked(key, consumer.ResultProcessed)
	}
	p.wantState("1", inbox.StateIgnored, 1)
}

func TestInboxFailureSkips(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle, OnFailure: inbox.FailureSkips})
	p.run()
	p.record("1", ordered("o", 1))
	g.wantEntered(t, "1")
	p.record("2", ordered("o", 2))
	p.record("3", ordered("o", 3))
	g.through <- consumer.Permanent(receivertest.ErrHandler)
	g.wantEntered(t, "2")
	// A replay goes before what is younger, but not beside what is being worked.
	if n, err := p.replay(inboxops.Selection{Key: "1"}); n != 1 || err != nil {
		t.Fatalf("replayed %d, %v", n, err)
	}
	p.wantState("1", inbox.StatePending, 0)
	testkit.Equal(t, "events of the key that are let go", p.Count("SELECT count(*) FROM inbox_events WHERE next_attempt_at IS NOT NULL"), 1)
	for _, key := range []string{"1", "3"} {
		g.through <- nil
		g.wantEntered(t, key)
	}
	g.through <- consumer.Permanent(receivertest.ErrHandler)
	p.awaitState("3", inbox.StateFailed)
	p.record("4", ordered("o", 4)) // recorded behind a failed one
	g.wantEntered(t, "4")
	g.through <- nil
}

// A replay takes the place of a younger event that waits for its next attempt. Nor does it wait for
// the next attempts of one that was being worked when it came.
func TestInboxReplayGoesFirst(t *testing.T) {
	t.Parallel()
	for name, waits := range map[string]bool{"the younger waits": true, "the younger is worked": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGate()
			p := newInbox(t, inbox.Config{Handle: g.handle, OnFailure: inbox.FailureSkips, Schedule: []time.Duration{time.Hour}})
			p.run()
			p.record("1", ordered("o", 1))
			g.wantEntered(t, "1")
			g.through <- consumer.Permanent(receivertest.ErrHandler)
			p.wantWorked("1", consumer.ResultFailed)
			p.record("2", ordered("o", 2))
			g.wantEntered(t, "2")
			if waits {
				g.through <- receivertest.ErrHandler
				p.wantWorked("2", consumer.ResultFailed)
			}
			if n, err := p.replay(inboxops.Selection{Key: "1"}); n != 1 || err != nil {
				t.Fatalf("replayed %d, %v", n, err)
			}
			if !waits {
				g.through <- receivertest.ErrHandler
			}
			for _, key := range []string{"1", "2"} { // whatever the schedule said of the second
				g.wantEntered(t, key)
				g.through <- nil
			}
			p.awaitState("2", inbox.StateSucceeded)
		})
	}
}

// An event that comes late goes before those that come behind it, unless they are being worked:
// they may be waiting for it.
func TestInboxLateEventsGoFirst(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle, Schedule: []time.Duration{time.Hour}})
	p.run()
	p.record("2", ordered("o", 2))
	g.wantEntered(t, "2")
	g.through <- receivertest.ErrHandler
	p.wantWorked("2", consumer.ResultFailed)
	p.record("1", ordered("o", 1))
	for _, key := range []string{"1", "2"} {
		g.wantEntered(t, key)
		g.through <- nil
	}
	p.awaitState("2", inbox.StateSucceeded)
}

// An event that comes before the one that failed does not wait for it, nor for those behind it.
func TestInboxLateEventsDoNotWaitForWhatFailedBehindThem(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.record("5", ordered("o", 5))
	p.MustExec("UPDATE inbox_events SET processing_state = 'failed', next_attempt_at = NULL")
	p.record("6", ordered("o", 6))
	p.record("3", ordered("o", 3))
	p.record("2", ordered("o", 2)) // takes its turn
	p.record("4", ordered("o", 4))
	testkit.Equal(t, "events of the key that are let go", p.Count("SELECT count(*) FROM inbox_events WHERE next_attempt_at IS NOT NULL"), 1)
	testkit.Equal(t, "the first is not let go", p.Count("SELECT count(*) FROM inbox_events WHERE next_attempt_at IS NOT NULL AND idempotency_key = '2'"), 1)
	p.run()
	for _, key := range []string{"2", "3", "4"} {
		p.wantWorked(key, consumer.ResultProcessed)
	}
	p.wantState("6", inbox.StatePending, 0)
}

// The lock of an ordering key that does not come costs a handler no attempt; and the bound of
// waiting for it does not reach what runs at the handler's COMMIT.
func TestInboxWaitsForAKeyOnItsOwnAccount(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle})
	p.MustExec(`CREATE FUNCTION unbound() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF current_setting('lock_timeout') <> '0' THEN RAISE 'lock_timeout is %', current_setting('lock_timeout'); END IF; RETURN NULL; END $$`)
	p.MustExec(`CREATE CONSTRAINT TRIGGER unbound AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION unbound()`)
	p.run()
	p.record("k", ordered("o", 1))
	g.wantEntered(t, "k")
	release := p.Hold(func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(hashtextextended(E'test\\noutbox\\no', 478660552050 # 'inbox_events'::regclass::oid::bigint))")
		return err
	})
	g.through <- nil
	p.wantWorked("k", consumer.ResultCommitFailed)
	release()
	g.wantEntered(t, "k")
	testkit.Equal(t, "attempts spent", p.Count("SELECT attempts FROM inbox_events"), 0)
	g.through <- nil
	p.wantWorked("k", consumer.ResultProcessed)
	p.wantState("k", inbox.StateSucceeded, 1)
}

// The database itself refuses two of a key at once, whatever program asks.
func TestInboxOrderIsAConstraint(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.record("1", ordered("o", 1))
	p.record("2", ordered("o", 2))
	for _, change := range []string{
		"next_attempt_at = now()", "processing_state = 'processing'",
	} {
		_, err := p.Pool.Exec(t.Context(), "UPDATE inbox_events SET "+change+" WHERE idempotency_key = '2'")
		if err == nil || !strings.Contains(err.Error(), "inbox_events_one_of_its_key") {
			t.Errorf("%s: %v", change, err)
		}
	}
}

// What an operator has changed by hand continues by itself.
func TestInboxSweepsWhatNobodyLetGo(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	p := newInbox(t, inbox.Config{PollInterval: never})
	for _, key := range []string{"a1", "a2", "b1", "c1", "c2", "d1", "d2"} {
		p.record(key, ordered(key[:1], int(key[1]-'0')))
	}
	p.record("alone")
	p.MustExec("UPDATE inbox_events SET processing_state = 'succeeded', next_attempt_at = NULL WHERE idempotency_key = 'a1'") // a2 is behind it
	p.MustExec("UPDATE inbox_events SET next_attempt_at = NULL WHERE idempotency_key IN ('b1', 'alone')")                     // set to pending again
	p.MustExec("UPDATE inbox_events SET processing_state = 'failed', next_attempt_at = NULL WHERE idempotency_key = 'c1'")    // blocks c2
	p.MustExec("DELETE FROM inbox_events WHERE idempotency_key = 'd1'")
	p.run()
	p.Await("SELECT count(*) = 4 FROM inbox_events WHERE idempotency_key IN ('a2', 'b1', 'alone', 'd2') AND processing_state = 'succeeded'")
	p.wantState("c2", inbox.StatePending, 0)
}
