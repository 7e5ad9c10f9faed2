package settle

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

const (
	relay = 1    // the number of the relay whose settler is tested
	fence = 1000 // of its claims
)

// A room is a settler over a database, and what it has reported.
type room struct {
	*relaytest.Database
	settler   *Settler
	forOthers string // a destination that other relays serve
	logged    relaytest.Buffer
	giveUp    context.CancelFunc
	running   sync.WaitGroup
	closed    bool

	mu      sync.Mutex
	written []Settlement
	dropped []int64 // events
	ended   []intake.RangeRef
	failed  []error
	stale   int
}

// newRoom returns one of whose database each event has pending deliveries, unless events are to be
// taken.
func newRoom(t testing.TB, taken bool, destinations ...string) *room {
	t.Helper()
	r := &room{Database: relaytest.New(t, destinations...), settler: New()}
	if !taken {
		r.Cover()
	}
	r.Serve("default")
	r.Serve("default")
	w := r.settler
	w.DB = pgtest.PoolWith(t, r.DSN, func(cfg *pgxpool.Config) { pg.SetDirect(cfg, "") })
	w.Log = zerolog.New(&r.logged)
	w.RelayID = func() int32 { return relay }
	w.NeedsRoom = func(string) bool { return false }
	w.ForOthers = func(destination string) bool { return destination == r.forOthers }
	w.Written = func(s []Settlement) { r.note(func() { r.written = append(r.written, s...) }) }
	w.Dropped = func(s *Settlement) { r.note(func() { r.dropped = append(r.dropped, s.EventID) }) }
	w.RangeEnded = func(of intake.RangeRef) { r.note(func() { r.ended = append(r.ended, of) }) }
	w.Failed = func(_ string, err error) { r.note(func() { r.failed = append(r.failed, err) }) }
	w.Stale = func(n int) { r.note(func() { r.stale += n }) }
	return r
}

// waiting returns a pool whose statements wait for locks as long as they last, as a session does.
func (r *room) waiting() *pgxpool.Pool {
	r.Helper()
	return pgtest.PoolWith(r, r.DSN, func(cfg *pgxpool.Config) {
		pg.SetDirect(cfg, "")
		cfg.ConnConfig.RuntimeParams["lock_timeout"] = "0"
	})
}

func (r *room) note(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// begin runs the settler, which the end of the test stops.
func (r *room) begin() *room {
	ctx, giveUp := context.WithCancel(context.WithoutCancel(r.Context()))
	r.giveUp = giveUp
	r.running.Go(func() { r.settler.Run(ctx) })
	r.Cleanup(func() {
		giveUp()
		r.end()
	})
	return r
}

// end waits until the settler has written all.
func (r *room) end() {
	if !r.closed {
		r.closed = true
		r.settler.Close()
	}
	r.running.Wait()
}

// settle passes settlements on.
func (r *room) settle(all ...Settlement) {
	for _, s := range all {
		r.settler.Settle(s)
	}
}

// awaits waits until something was reported.
func (r *room) awaits(what string, is func() bool) {
	r.Helper()
	relaytest.Eventually(r, what, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return is()
	})
}

// awaitsWritten waits until so many settlements are written.
func (r *room) awaitsWritten(n int) {
	r.Helper()
	r.awaits("the settlements", func() bool { return len(r.written) >= n })
}

// claim inserts events, makes the relay claim their deliveries to "default", and returns these as
// delivered.
func (r *room) claim(n int, prefix string) (all []Settlement) {
	r.Helper()
	last := relaytest.Row[int64](r.Database, `SELECT coalesce(max(id), 0) FROM outbox`)
	r.Insert(n, prefix)
	r.Exec(`UPDATE outbox_delivery SET claim = $1, claimed_by = $2, lease_expires_at = now() + interval '1 hour' WHERE event_id > $3 AND destination = 'default'`, fence, relay, last)
	for i, id := range relaytest.Rows[int64](r.Database, `SELECT id FROM outbox WHERE id > $1 ORDER BY id`, last) {
		all = append(all, Settlement{
			EventID: id, Destination: "default", Fence: fence, LeaseEnds: time.Now().Add(time.Hour), StartedAt: time.Now(),
			Key: new(fmt.Sprintf("%s-%d", prefix, i+1)), Decision: decided(policy.Delivered),
		})
	}
	return all
}

// decided returns a decision with which a request ended.
func decided(outcome policy.Outcome) policy.Decision {
	d := policy.Decision{Outcome: outcome, Logged: true, Result: policy.Result{Posted: true, StatusCode: 500, Reason: policy.ReasonServerError, Message: "no"}}
	switch outcome {
	case policy.Delivered:
		d.Logged, d.Result = false, policy.Result{Posted: true, StatusCode: 204, Reason: policy.ReasonOK}
	case policy.Retry:
		d.Delay = time.Hour
	case policy.Hold:
		d.Logged, d.Result = false, policy.Result{Reason: policy.ReasonShutdown}
	}
	return d
}

// with returns a settlement with another outcome.
func with(s Settlement, outcome policy.Outcome) Settlement {
	s.Decision = decided(outcome)
	return s
}

// take takes a range of all new events, each for "default", and holds it.
func (r *room) take() *TakenRange {
	r.Helper()
	taken, err := intake.TakeRange(r.Context(), r.settler.DB, relay, intake.Terms{Events: 100, Inline: 1 << 20}, false)
	relaytest.Must(r, err)
	of := &TakenRange{Seq: taken.Seq, Fence: taken.Fence, RelayID: relay, Begun: time.Now(), Taken: time.Now()}
	for i := range taken.Events {
		e := &taken.Events[i]
		of.Deliveries = append(of.Deliveries, InHand{
			Range: of, EventID: e.ID, Destination: "default", OrderingKey: e.OrderingKey, PayloadBytes: len(e.Payload), LeaseEnds: time.Now().Add(time.Hour),
			NotAfter: time.Now().Add(time.Hour),
		})
	}
	r.settler.Track(of)
	return of
}

// keepYoung puts off by an hour when what is left of a range gets rows.
func (r *TakenRange) keepYoung() {
	r.Begun = r.Begun.Add(time.Hour)
}

// settlement returns a delivery in hand as delivered.
func (d *InHand) settlement() Settlement {
	return Settlement{
		EventID: d.EventID, Destination: d.Destination, Fence: d.Range.Fence, OrderingKey: d.OrderingKey, LeaseEnds: d.LeaseEnds, NotAfter: d.NotAfter,
		Promised: true, StartedAt: time.Now(), InHand: d, Decision: decided(policy.Delivered),
	}
}

// rows returns what a row of each event looks like.
func (r *room) rows() []string {
	r.Helper()
	return relaytest.Rows[string](r.Database, `SELECT concat_ws(' ', event_id, status, attempts, last_http_status, last_reason, last_error,
		CASE WHEN claimed_by IS NOT NULL THEN 'claimed' END, CASE WHEN next_attempt_at > now() + interval '30 minutes' THEN 'later' END,
		CASE WHEN delivered_at IS NOT NULL THEN 'dated' END) FROM outbox_delivery ORDER BY event_id, destination`)
}

// wantRows compares the rows.
func (r *room) wantRows(want ...string) {
	r.Helper()
	if got := r.rows(); !slices.Equal(got, want) {
		r.Errorf("the rows are\n%q, want\n%q", got, want)
	}
}
