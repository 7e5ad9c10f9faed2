package control

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/admin/history"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// What is said first is what a person must do something about.
func TestFindings(t *testing.T) {
	t.Parallel()
	alive := []ops.RelayStatus{{Name: "r", HeartbeatAgeSeconds: 1}}
	for name, test := range map[string]struct {
		status ops.Status
		want   []string
	}{
		"all is well":      {ops.Status{Relays: alive, Destinations: []ops.DestinationStatus{{Destination: "a", Pending: 3, Routed: true, Served: true, Breaker: "closed"}}}, nil},
		"no relay":         {ops.Status{}, []string{"warning No relay is running."}},
		"no relay, a rush": {ops.Status{Parked: 1, Relays: []ops.RelayStatus{{HeartbeatAgeSeconds: 30}}}, []string{"critical No relay is running, and 1 delivery waits.", "warning 1 event matches no route."}},
		"quarantined":      {ops.Status{Quarantined: "a copy", Relays: alive}, []string{"critical Relays do nothing here: a copy"}},
		"one down, one failed": {ops.Status{Relays: alive, Destinations: []ops.DestinationStatus{
			{Destination: "a", Failed: 20_000, FailedError: "422 no.", Routed: true, Served: true, Breaker: "closed"},
			{Destination: "b", Pending: 2, Retrying: 1, LagSeconds: 900, Routed: true, Served: true, Breaker: "open", BreakerError: "503"},
		}}, []string{"critical b is down: 503; 2 deliveries are held.", "warning a has more than 10000 failed deliveries; last: 422 no."}},
		"paused":   {ops.Status{Relays: alive, Destinations: []ops.DestinationStatus{{Destination: "a", Paused: true, PausedReason: "x", Served: true, Breaker: "closed"}}}, []string{"warning a is paused (x); nothing waits."}},
		"unserved": {ops.Status{Relays: alive, Destinations: []ops.DestinationStatus{{Destination: "a", Pending: 1, Breaker: "closed"}}}, []string{"critical a is served by no running relay; 1 delivery waits."}},
		"lagging":  {ops.Status{Relays: alive, Destinations: []ops.DestinationStatus{{Destination: "a", Pending: 1, LagSeconds: 125, Served: true, Breaker: "closed"}}}, []string{"warning a lags by 2m; 1 delivery waits."}},
		"blocked":  {ops.Status{Relays: alive, Destinations: []ops.DestinationStatus{{Destination: "a", BlockedKeys: 1, LagSeconds: 125, Served: true, Breaker: "closed"}}}, []string{"warning a has 1 ordering key that waits behind a failed event."}},
		"retrying": {ops.Status{Relays: alive, Destinations: []ops.DestinationStatus{{Destination: "a", Pending: 1, Retrying: 1, RetryError: "500", Served: true, Routed: true, Breaker: "closed"}}}, []string{"notice a has 1 delivery that is retried; last: 500."}},
		"retrying in vain, and late": {ops.Status{Relays: alive, Destinations: []ops.DestinationStatus{{
			Destination: "a", Pending: 2, Retrying: 1, RetryReason: policy.ReasonUnauthorized, RetryError: "401", LagSeconds: 125, Served: true, Routed: true, Breaker: "closed",
		}}}, []string{"warning a has 1 delivery that is retried; last: 401."}},
	} {
		var got []string
		for _, f := range Findings(test.status) {
			got = append(got, string(f.Level)+" "+f.Text)
			if f.Advice == "" {
				t.Errorf("%s: %q comes without advice", name, f.Text)
			}
		}
		if strings.Join(got, "\n") != strings.Join(test.want, "\n") {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// Many who look at once cost one status.
func TestStatusIsShared(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	c := New(Config{Outbox: ops.New(db.Pool), History: history.New()})
	now := time.Now()
	c.now = func() time.Time { return now }
	first, err := c.Status(t.Context())
	relaytest.Must(t, err)
	db.Insert(1, "k")
	if again, err := c.Status(t.Context()); err != nil || !again.At.Equal(first.At) {
		t.Errorf("it was read again: %v", err)
	}
	now = now.Add(statusAge)
	if later, err := c.Status(t.Context()); err != nil || later.Destinations[0].Pending != 1 {
		t.Errorf("%+v, %v", later, err)
	}
}

// A token confirms one order, for a while. What runs when the process stops is interrupted and says so.
func TestOrders(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	db.Insert(3000, "k")
	db.Settled("failed", "true")
	// Each batch waits until the test lets it go.
	gate := db.Begin()
	_, err := gate.Exec(t.Context(), `SELECT pg_advisory_xact_lock(4471)`)
	relaytest.Must(t, err)
	db.Exec(`CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock(4471); RETURN NEW; END'`)
	db.Exec(`CREATE TRIGGER wait BEFORE UPDATE OF done ON outbox_audit FOR EACH ROW EXECUTE FUNCTION wait()`)
	c := New(Config{Outbox: ops.New(db.Pool), History: history.New()})
	now := time.Now()
	c.now = func() time.Time { return now }
	actor := ops.Actor{Name: "ann", Origin: ops.OriginAPI}
	preview, err := c.Preview(t.Context(), ops.Order{Action: "replay", Selection: ops.Selection{Destination: "default"}})
	relaytest.Must(t, err)
	if _, err := c.Start(t.Context(), actor, preview.Order, preview.Token); !errors.Is(err, ErrBusy) {
		t.Errorf("before Run: %v", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	var id int64
	relaytest.Eventually(t, "the start", func() bool {
		id, err = c.Start(t.Context(), actor, preview.Order, preview.Token)
		return !errors.Is(err, ErrBusy)
	})
	relaytest.Must(t, err)
	now = now.Add(confirmWithin)
	if _, err := c.Start(t.Context(), actor, preview.Order, preview.Token); !errors.Is(err, ErrNotConfirmed) {
		t.Errorf("an old token: %v", err)
	}
	if !c.Runs(id) || c.Interrupt(id+1) {
		t.Error("it does not know what it works on")
	}
	stop()
	relaytest.Must(t, gate.Rollback(t.Context()))
	running.Wait()
	if got := relaytest.Row[string](db, `SELECT state || ' ' || (done < 3000) FROM outbox_audit`); got != "interrupted true" {
		t.Error(got)
	}
	if c.Runs(id) {
		t.Error("it still runs")
	}
}
