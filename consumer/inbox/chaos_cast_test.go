package inbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

const (
	inboxLife = "OUTBOX_TEST_LIFE" // names a life of the roles "record" and "work" to itself
	inboxCalm = "OUTBOX_TEST_CALM" // its handler fails only when it is bidden to
)

// entry is one line of a role's journal, written before what it tells can be undone by the death of
// the process.
type entry struct {
	Op      string    `json:"op"` // one of the following
	At      time.Time `json:"at"`
	URL     string    `json:"url,omitempty"`     // ready
	Key     string    `json:"key,omitempty"`     // began, finished
	Outcome string    `json:"outcome,omitempty"` // finished
	Err     string    `json:"err,omitempty"`     // finished, stopped
}

const (
	opReady    = "ready"    // the process listens
	opBegan    = "began"    // the handler runs
	opFinished = "finished" // the outcome of a run is committed
	opStopped  = "stopped"  // Run returned, because the process was told to end
	opBrought  = "brought"  // by the test itself: its last event is brought
)

func note(e entry) {
	e.At = time.Now()
	line, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain fields always encode
	}
	_, _ = os.Stdout.Write(append(line, '\n')) // one write: lines of several goroutines do not mix
}

const chaosSchema = `
CREATE TABLE effect (
	id           bigint GENERATED ALWAYS AS IDENTITY,
	key          text NOT NULL, -- not unique: a doubled effect must show
	ordering_key text NOT NULL,
	sequence     bigint NOT NULL,
	in_turn      boolean NOT NULL,
	life         text NOT NULL
)`

// insertEffect looks, besides, whether it is the event's turn: nothing else of its ordering key is
// let go or running, and nothing before it waits, or has failed and blocks it. Each question is one
// that an index answers.
const insertEffect = `
INSERT INTO public.effect (key, ordering_key, sequence, in_turn, life)
SELECT $1, $2, $3, $2 = '' OR NOT (
	EXISTS (SELECT FROM public.inbox_events WHERE receiver = 'test' AND source = 'outbox' AND ordering_key = $2 AND idempotency_key <> $1
		AND (processing_state = 'processing' OR processing_state = 'pending' AND next_attempt_at IS NOT NULL))
	OR EXISTS (SELECT FROM public.inbox_events WHERE receiver = 'test' AND source = 'outbox' AND ordering_key = $2 AND sequence < $3
		AND processing_state = 'pending' AND next_attempt_at IS NULL)
	OR EXISTS (SELECT FROM public.inbox_events WHERE receiver = 'test' AND source = 'outbox' AND ordering_key = $2 AND sequence < $3
		AND processing_state = 'failed')), $4`

// recordOnly is a process that records events and works none.
func recordOnly(p *receivertest.Player) { playInbox(p, false) }

// recordAndWork is a process that does both.
func recordAndWork(p *receivertest.Player) { playInbox(p, true) }

// chaosConfig is the inbox of every process.
func chaosConfig(handle consumer.Handler[pgx.Tx]) inbox.Config {
	return inbox.Config{
		Config:   consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}, Logger: slog.New(slog.DiscardHandler)},
		Handle:   handle,
		Workers:  8,
		Schedule: []time.Duration{100 * time.Millisecond, 300 * time.Millisecond, time.Second},
	}
}

func playInbox(p *receivertest.Player, works bool) {
	work := workAsBidden(os.Getenv(inboxLife), os.Getenv(inboxCalm) != "")
	cfg := chaosConfig(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		note(entry{Op: opBegan, Key: event.IdempotencyKey})
		return work(ctx, tx, event)
	})
	cfg.Config.Observe = func(_ context.Context, r consumer.Report) {
		if !r.Inbox {
			return
		}
		e := entry{Op: opFinished, Key: r.Event.IdempotencyKey, Outcome: string(r.Result)}
		if r.Err != nil {
			e.Err = r.Err.Error()
		}
		note(e)
	}
	in := receivertest.Must(inbox.New(p.Pool(), cfg))
	listener, url := p.Listen()
	mux := http.NewServeMux()
	mux.Handle("/", in.Handler())
	serveNeighbours(mux, p)
	go func() { panic(http.Serve(listener, mux)) }()
	note(entry{Op: opReady, URL: url})

	ctx, stop := context.WithCancel(context.Background())
	go func() {
		<-p.Orders
		stop()
	}()
	if works {
		if err := in.Run(ctx); err != nil {
			panic(err)
		}
	} else {
		<-ctx.Done()
	}
	note(entry{Op: opStopped})
	os.Exit(0)
}

// workAsBidden does to an event what its payload says, and fails one in fifty of the rest unless
// calm.
func workAsBidden(life string, calm bool) consumer.Handler[pgx.Tx] {
	return func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		var b brought
		if err := json.Unmarshal(event.Payload, &b); err != nil {
			return consumer.Permanent(err)
		}
		if b.Bidding == toIgnore {
			return consumer.Ignore("of no concern")
		}
		_, err := consumer.Tx(ctx).Exec(ctx, insertEffect, event.IdempotencyKey, event.OrderingKey, event.Sequence, life)
		switch {
		case err != nil:
			return fmt.Errorf("insert effect: %w", err)
		case b.Bidding != toSucceed:
			return consumer.Permanent(errors.New("this cannot be done"))
		}
		if !calm && rand.IntN(20) == 0 { // long enough for a kill to come in the middle
			if _, err := consumer.Tx(ctx).Exec(ctx, "SELECT pg_sleep(0.05)"); err != nil {
				return fmt.Errorf("pause: %w", err)
			}
		}
		if !calm && rand.IntN(50) == 0 {
			if err := leaveTenantBehind(ctx); err != nil {
				return err
			}
		}
		// What is drawn here comes after the effect, which must be rolled back.
		switch draw := rand.Float64(); {
		case calm:
		case draw < 0.010:
			return errors.New("out of cardboard")
		case draw < 0.014:
			return consumer.RetryAfter(errors.New("the lorry is away"), 50*time.Millisecond)
		case draw < 0.017:
			panic("the shelf fell over")
		case draw < 0.020:
			runtime.Goexit()
		}
		return nil
	}
}

// In the chaos an inbox has neighbours that get the same events from the same sender, each in every
// process of the cast: a receiver of another name beside it, and one of its own name in another
// schema. And the inbox serves several tenants, so that some of its handlers leave a search_path
// behind in which there are tables of the same names.
const neighboursSchema = `
CREATE TABLE effect_beside (key text NOT NULL);
CREATE SCHEMA apart;
CREATE TABLE apart.effect_apart (key text NOT NULL);
CREATE TABLE apart.processed_events (LIKE processed_events INCLUDING ALL);
CREATE TABLE apart.inbox_forgotten (LIKE inbox_forgotten INCLUDING ALL);
CREATE FUNCTION apart.inbox_reset() RETURNS boolean LANGUAGE sql AS 'SELECT public.inbox_reset()';
CREATE SCHEMA tenant;
CREATE TABLE tenant.processed_events (LIKE processed_events INCLUDING ALL);
CREATE TABLE tenant.inbox_events (LIKE inbox_events INCLUDING ALL);
CREATE TABLE tenant.inbox_forgotten (LIKE inbox_forgotten INCLUDING ALL)`

// neighbours are where they listen, and the tables of their effects.
var neighbours = map[string]string{"/beside": "effect_beside", "/apart": "apart.effect_apart"}

// neighbourEvery is how many events pass for one that is brought to the neighbours, too.
const neighbourEvery = 4

// serveNeighbours adds them to what a process serves.
func serveNeighbours(mux *http.ServeMux, p *receivertest.Player) {
	quiet := slog.New(slog.DiscardHandler)
	for path, table := range neighbours {
		cfg, dsn := consumer.Config{Receiver: "beside", Secrets: []string{receivertest.SecretText}, Logger: quiet}, p.DSN
		if path == "/apart" {
			cfg.Receiver, dsn = "test", receivertest.WithSetting(p.DSN, "search_path", "apart")
		}
		pool, err := pgxpool.New(context.Background(), dsn)
		if err != nil {
			panic(err)
		}
		receive := receivertest.Must(consumer.Middleware(pool, cfg))
		mux.Handle(path, receive(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, err := consumer.Tx(r.Context()).Exec(r.Context(), "INSERT INTO "+table+" VALUES ($1)", consumer.EventFrom(r.Context()).IdempotencyKey)
			if err != nil {
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			w.WriteHeader(http.StatusNoContent)
		})))
	}
}

// leaveTenantBehind is what multi-tenant code does.
func leaveTenantBehind(ctx context.Context) error {
	if _, err := consumer.Tx(ctx).Exec(ctx, "SELECT set_config('search_path', 'tenant, public', false)"); err != nil {
		return fmt.Errorf("set search_path: %w", err)
	}
	return nil
}

// wantNeighbours wants one effect for each event that a neighbour acknowledged, and nothing in the
// tenant's tables.
func (s *chaosStage) wantNeighbours(l *chaosLoad) {
	s.t.Helper()
	for path, table := range neighbours {
		brought := 0
		for _, e := range l.events {
			if e.beside[path] {
				brought++
			}
		}
		var effects, events int
		pgtest.Must(s.t, s.pool.QueryRow(s.t.Context(), "SELECT count(*), count(DISTINCT key) FROM "+table).Scan(&effects, &events))
		if brought == 0 || effects != brought || events != brought {
			s.t.Errorf("%s acknowledged %d events and has %d effects of %d events", path, brought, effects, events)
		}
		s.t.Logf("%s: %d events, %d effects", path, brought, effects)
	}
	var strays int
	if err := s.pool.QueryRow(s.t.Context(), `SELECT (SELECT count(*) FROM tenant.processed_events) + (SELECT count(*) FROM tenant.inbox_events)`).Scan(&strays); err != nil || strays > 0 {
		s.t.Errorf("%d rows are in the tenant's tables, %v", strays, err)
	}
}
