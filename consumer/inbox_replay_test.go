package consumer_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

func TestInboxFilters(t *testing.T) {
	t.Parallel()
	p := newInbox(t, consumer.InboxConfig{})
	// Numbers 1 to 8; types and states differ.
	types := []string{"invoice.created", "invoice.paid", "invoice_paid", "refund", "100%", "invoice.created", "invoice.created", "invoice.created"}
	states := []consumer.State{
		consumer.StateFailed, consumer.StateFailed, consumer.StateFailed, consumer.StateIgnored, consumer.StateIgnored,
		consumer.StatePending, consumer.StateProcessing, consumer.StateSucceeded,
	}
	for i, kind := range types {
		key := fmt.Sprint("k", i+1)
		p.record(key, with(webhook.EventType, kind))
		p.mustExec(`UPDATE inbox_events SET processing_state = $2, received_at = $3::timestamptz, next_attempt_at = CASE WHEN $2 = 'pending' THEN now() END,
			attempts = 7, interruptions = 3, claimed_at = now() WHERE idempotency_key = $1`, key, string(states[i]), fmt.Sprintf("2026-01-0%dT00:00:00Z", i+1))
	}
	p.mustExec("UPDATE inbox_events SET ordering_key = 'o' WHERE idempotency_key = 'k3'")
	p.mustExec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('test', 'outbox', 'of the middleware', 'ignored')`)
	p.mustExec(`INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, inbox_id) VALUES ('test', 'another', 'k1', 'failed', 100)`)
	day := func(n int) time.Time { return time.Date(2026, 1, n, 0, 0, 0, 0, time.UTC) }
	all := func(states ...consumer.State) []consumer.State { return states }

	for name, test := range map[string]struct {
		filter        consumer.Filter
		count, replay string // numbers
	}{
		"from":                 {consumer.Filter{FromID: 4}, "45678", "45"},
		"to":                   {consumer.Filter{ToID: 2}, "12", "12"},
		"range":                {consumer.Filter{FromID: 2, ToID: 4}, "234", "234"},
		"one":                  {consumer.Filter{FromID: 3, ToID: 3}, "3", "3"},
		"limit":                {consumer.Filter{FromID: 1, Limit: 2}, "12", "12"},
		"type":                 {consumer.Filter{Type: "invoice.created"}, "1678", "1"},
		"types":                {consumer.Filter{Type: "invoice.*"}, "12678", "12"},
		"an underscore":        {consumer.Filter{Type: "invoice_paid"}, "3", "3"},
		"a percent sign":       {consumer.Filter{Type: "1*%"}, "5", "5"},
		"any type":             {consumer.Filter{Type: "*"}, "12345678", "12345"},
		"failed":               {consumer.Filter{States: all(consumer.StateFailed)}, "123", "123"},
		"ignored":              {consumer.Filter{States: all(consumer.StateIgnored)}, "45", "45"},
		"succeeded":            {consumer.Filter{States: all(consumer.StateSucceeded)}, "8", "8"},
		"pending":              {consumer.Filter{States: all(consumer.StatePending)}, "6", "6"},
		"failed and succeeded": {consumer.Filter{States: all(consumer.StateFailed, consumer.StateSucceeded)}, "1238", "1238"},
		"since":                {consumer.Filter{Since: day(3)}, "345678", "345"},
		"until":                {consumer.Filter{Until: day(3)}, "12", "12"},
		"between":              {consumer.Filter{Since: day(2), Until: day(4)}, "23", "23"},
		"key":                  {consumer.Filter{Key: "k2"}, "2", "2"},
		"no such key":          {consumer.Filter{Key: "of the middleware"}, "", ""},
		"ordering key":         {consumer.Filter{OrderingKey: "o"}, "3", "3"},
		"all at once":          {consumer.Filter{FromID: 1, ToID: 3, Type: "invoice*", States: all(consumer.StateFailed), Since: day(2), Key: "k3", OrderingKey: "o"}, "3", "3"},
	} {
		n, err := p.inbox.Count(t.Context(), test.filter)
		if err != nil || n != int64(len(test.count)) {
			t.Errorf("%s: counted %d, %v, want %d", name, n, err, len(test.count))
		}
		p.mustExec("CREATE TABLE before AS SELECT * FROM inbox_events")
		n, err = p.inbox.Replay(t.Context(), test.filter)
		if err != nil || n != int64(len(test.replay)) {
			t.Errorf("%s: replayed %d, %v, want %d", name, n, err, len(test.replay))
		}
		var got string
		if err := p.pool.QueryRow(t.Context(), `SELECT coalesce(string_agg(inbox_id::text, '' ORDER BY inbox_id), '') FROM inbox_events
			WHERE processing_state = 'pending' AND next_attempt_at <= now() AND attempts = 0 AND interruptions = 0`).Scan(&got); err != nil || got != test.replay {
			t.Errorf("%s: replayed %q, want %q (%v)", name, got, test.replay, err)
		}
		if others := p.count(`SELECT count(*) FROM before b JOIN inbox_events e USING (source, idempotency_key)
			WHERE b <> e AND NOT coalesce(e.source = 'outbox' AND strpos($1, e.inbox_id::text) > 0, false)`, test.replay); others != 0 {
			t.Errorf("%s: %d other rows were changed", name, others)
		}
		p.mustExec("TRUNCATE inbox_events")
		p.mustExec("INSERT INTO inbox_events SELECT * FROM before")
		p.mustExec("DROP TABLE before")
	}

	n, err := p.inbox.Ignore(t.Context(), consumer.Filter{Type: "*"})
	if err != nil || n != 4 {
		t.Errorf("ignored %d, %v, want the 3 that failed and the one that is pending", n, err)
	}
	if n := p.count("SELECT count(*) FROM inbox_events WHERE processing_state = 'ignored' AND next_attempt_at IS NULL"); n != 6 {
		t.Errorf("%d are ignored, want 6", n)
	}
}

func TestInboxRefusesFiltersThatMeanNothing(t *testing.T) {
	t.Parallel()
	p := newInbox(t, consumer.InboxConfig{})
	now := time.Now()
	type operation func(context.Context, consumer.Filter) (int64, error)
	for want, test := range map[string]struct {
		do     operation
		filter consumer.Filter
	}{
		"an empty Filter would choose every event":             {p.inbox.Replay, consumer.Filter{}},
		"an empty Filter would choose every event: set":        {p.inbox.Ignore, consumer.Filter{Limit: 5}},
		"an empty Filter would choose every event: set FromID": {p.inbox.Count, consumer.Filter{}},
		"FromID 5 is above ToID 4":                             {p.inbox.Count, consumer.Filter{FromID: 5, ToID: 4}},
		"are -1 and 0: numbers begin at 1":                     {p.inbox.Count, consumer.Filter{FromID: -1}},
		"is not before Until":                                  {p.inbox.Count, consumer.Filter{Since: now, Until: now}},
		"Limit is negative: -1":                                {p.inbox.Count, consumer.Filter{FromID: 1, Limit: -1}},
		`"done" is no state of an event`:                       {p.inbox.Count, consumer.Filter{States: []consumer.State{"done"}}},
		"this cannot be done to events that are processing":    {p.inbox.Replay, consumer.Filter{States: []consumer.State{consumer.StateProcessing}}},
		"this cannot be done to events that are succeeded":     {p.inbox.Ignore, consumer.Filter{States: []consumer.State{consumer.StateSucceeded}}},
	} {
		if n, err := test.do(t.Context(), test.filter); err == nil || n != 0 || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "consumer: ") {
			t.Errorf("%+v: %d, %v; want %q", test.filter, n, err, want)
		}
	}
}

// A replay of more than a batch, of many keys, while workers run: each takes effect once more, in order.
func TestInboxReplaysManyInOrder(t *testing.T) {
	t.Parallel()
	p := newInbox(t, consumer.InboxConfig{Workers: 8})
	p.mustExec(`INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, attempts, payload, request_headers, ordering_key, sequence)
		SELECT 'test', 'outbox', i, 't', 'failed', 8, '{}', '{}', 'o' || i % 50, i FROM generate_series(1, 1500) i`)
	p.run()
	n, err := p.inbox.Replay(t.Context(), consumer.Filter{States: []consumer.State{consumer.StateFailed}})
	if n != 1500 || err != nil {
		t.Fatalf("replayed %d, %v", n, err)
	}
	p.await("SELECT count(*) = 1500 FROM inbox_events WHERE processing_state = 'succeeded' AND attempts = 1")
	p.wantInOrder()
	if n := p.count("SELECT count(*) FROM effect"); n != 1500 {
		t.Errorf("%d effects", n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := p.inbox.Replay(ctx, consumer.Filter{FromID: 1, States: []consumer.State{consumer.StateSucceeded}}); n != 0 || err == nil {
		t.Errorf("replayed %d, %v although the context had ended", n, err)
	}
}

// A few among many are found in short transactions, too: what has been found is changed before the rest is looked at.
func TestInboxLooksForFewInShortTransactions(t *testing.T) {
	t.Parallel()
	for state, test := range map[consumer.State]struct {
		change func(*consumer.Inbox, context.Context, consumer.Filter) (int64, error)
		want   consumer.State
		others consumer.State
	}{
		consumer.StatePending: {(*consumer.Inbox).Ignore, consumer.StateIgnored, consumer.StateSucceeded},
		consumer.StateFailed:  {(*consumer.Inbox).Replay, consumer.StatePending, consumer.StateIgnored},
	} {
		t.Run(string(state), func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, consumer.InboxConfig{})
			p.mustExec(`INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, attempts, payload)
				SELECT 'test', 'outbox', i, CASE WHEN i % 10500 = 1 THEN 'few' ELSE 'many' END, CASE WHEN i % 10500 = 1 THEN $1 ELSE $2 END, 1, '{}'
				FROM generate_series(1, 21001) i`, string(state), string(test.others))
			p.mustExec(`CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NEW; END $$`)
			p.mustExec(`CREATE TRIGGER held BEFORE UPDATE ON inbox_events FOR EACH ROW WHEN (OLD.idempotency_key = '21001') EXECUTE FUNCTION held()`)
			release := p.hold(func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(7)")
				return err
			})
			changed := make(chan int64, 1)
			go func() {
				n, err := test.change(p.inbox, t.Context(), consumer.Filter{Type: "few"})
				if err != nil {
					t.Error(err)
				}
				changed <- n
			}()
			p.awaitState("1", test.want)
			p.awaitState("10501", test.want)
			p.wantState("21001", state, 1)
			release()
			if n := <-changed; n != 3 {
				t.Errorf("%d events are changed, want 3", n)
			}
			p.wantState("21001", test.want, map[consumer.State]int{consumer.StateIgnored: 1}[test.want])
		})
	}
}

func TestInboxConfigMistakes(t *testing.T) {
	t.Parallel()
	pool := poolOf(t, "postgres://nobody@127.0.0.1:1/x", 9)
	handle := func(context.Context, pgx.Tx, consumer.Event) error { return nil }
	nan := 2.0
	for want, cfg := range map[string]consumer.InboxConfig{
		"InboxConfig.Handle is nil":                       {},
		"Config.Secrets is empty":                         {Handle: handle},
		"InboxConfig.Workers is negative: -1":             {Workers: -1},
		"InboxConfig.Workers is 9, which the pool cannot": {Workers: 9},
		`InboxConfig.TypeWorkers["t"] is 0`:               {TypeWorkers: map[string]int{"t": 0}},
		"InboxConfig.PollInterval is negative: -1s":       {PollInterval: -time.Second},
		"InboxConfig.DrainTimeout is negative: -1s":       {DrainTimeout: -time.Second},
		"InboxConfig.Schedule[1] is -1s":                  {Schedule: []time.Duration{0, -time.Second}},
		"InboxConfig.Jitter is 2: set 0 to 1":             {Jitter: &nan},
		"InboxConfig.MaxAttempts is negative: -1":         {MaxAttempts: -1},
		`InboxConfig.OnFailure: "park" is not known`:      {OnFailure: "park"},
	} {
		t.Run(want, func(t *testing.T) {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.HasPrefix(got, "consumer: "+want) {
					t.Errorf("panicked with %q", got)
				}
			}()
			if cfg.Handle == nil && !strings.Contains(want, "Handle is nil") {
				cfg.Handle = handle
			}
			if !strings.Contains(want, "Secrets") {
				cfg.Secrets = []string{secretText}
			}
			cfg.Receiver = "test"
			consumer.MustNewInbox(pool, cfg)
		})
	}
	for name, what := range map[string]func(){
		"consumer: NewInbox needs a pool": func() { consumer.MustNewInbox(nil, consumer.InboxConfig{}) },
		"consumer: an inbox needs a pool of at least 2 connections": func() {
			consumer.MustNewInbox(poolOf(t, "postgres://nobody@127.0.0.1:1/x", 1), consumer.InboxConfig{Handle: handle, Config: consumer.Config{Receiver: "test", AllowUnsigned: true}})
		},
	} {
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.HasPrefix(got, name) {
					t.Errorf("panicked with %q, want %q", got, name)
				}
			}()
			what()
		}()
	}
}

// What the receiver may have forgotten is refused here as everywhere.
func TestInboxRefusesWhatItMayHaveForgotten(t *testing.T) {
	t.Parallel()
	p := newInbox(t, consumer.InboxConfig{})
	p.record("known", with(webhook.CreatedAt, "2026-01-01T00:00:00Z"))
	p.mustExec("INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('test', 'outbox', '2026-02-01T00:00:00Z', now())")
	wantProblem(t, p.do(p.newRequest("old", "{}", with(webhook.CreatedAt, "2026-01-31T00:00:00Z"))), 422, "forgotten")
	wantProblem(t, p.do(p.newRequest("late", "{}", with(webhook.NotAfter, "2026-01-31T00:00:00Z"))), 422, "forgotten")
	wantReplayed(t, p.do(p.newRequest("known", `{"key":"known"}`, with(webhook.CreatedAt, "2026-01-01T00:00:00Z"))), 200, `{"state":"pending"}`+"\n")
	p.record("new", with(webhook.CreatedAt, "2026-02-02T00:00:00Z"), func(h http.Header) { h.Set(webhook.NotAfter, "2126-02-02T00:00:00Z") })
	for _, table := range []string{"processed_events", "inbox_events"} {
		if n := p.count("SELECT count(*) FROM " + table + " WHERE not_after = '2126-02-02T00:00:00Z'"); n != 1 {
			t.Errorf("not_after is not stored in %s", table)
		}
		if n := p.count("SELECT count(*) FROM " + table); n != 2 {
			t.Errorf("%d rows in %s, want 2", n, table)
		}
	}
}
