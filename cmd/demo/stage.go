package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/process"
)

// A stage is what the play takes place on: the databases of both services, the processes that work
// on them, and the network.
type stage struct {
	*process.Stage
	network            network
	finance, logistics *pgxpool.Pool

	absence  time.Duration // of a relay that was killed
	receiver *process.Unit
	onDeath  func() // called when a receiver has died of its faults; may be nil
}

// Every wait for something that ought to happen within a second or two is bounded by patience.
// drainPatience is longer than a lease: deliveries that waited for one show as late, not as stuck.
const (
	patience      = 30 * time.Second
	drainPatience = 90 * time.Second
)

// openStage starts PostgreSQL and migrates both databases with outbox-relay. ctx ends the play.
func openStage(ctx context.Context, relay string, seed uint64) (s *stage, err error) {
	s = &stage{network: network{seed: seed}}
	// Commit times make the latency exact, and show an answer that came before its commit.
	s.Stage, err = process.OpenStage(ctx, relay, localpg.Options{Settings: map[string]string{"track_commit_timestamp": "on"}})
	if err == nil {
		s.finance, err = s.Database(financeName, "outbox", financeTables)
	}
	if err == nil {
		s.logistics, err = s.Database(logisticsName, "inbox", logisticsTables)
	}
	if err == nil {
		err = s.network.open()
	}
	if err != nil {
		return s, errors.Join(err, s.close())
	}
	return s, nil
}

const financeTables = `
CREATE TABLE invoices (
    number       text PRIMARY KEY,
    customer     text NOT NULL,
    amount_cents bigint NOT NULL
);

-- What the demo itself notes down: what was done to whom, which relay was which, and each claim and range that a relay lost by dying.
CREATE TABLE demo_note (what text, name text, PRIMARY KEY (what, name));
CREATE TABLE demo_relay (relay_id integer PRIMARY KEY, life text NOT NULL);
CREATE TABLE demo_lost_claim (delivery text PRIMARY KEY, relay_id integer NOT NULL);
CREATE TABLE demo_lost_range (fence text PRIMARY KEY, relay_id integer NOT NULL, events bigint NOT NULL);
CREATE FUNCTION demo_unsettled(outbox_range) RETURNS bigint STABLE LANGUAGE sql AS $$ -- events of a range
    SELECT count(*) FROM outbox o
    WHERE o.id > $1.low AND o.id <= $1.upto AND pg_visible_in_snapshot(o.xid, $1.target) AND NOT pg_visible_in_snapshot(o.xid, $1.base)
      AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = o.id)
$$;
CREATE FUNCTION demo_note() RETURNS trigger LANGUAGE plpgsql SET search_path = public AS $$ -- relays search no schema of ours
BEGIN
    IF TG_TABLE_NAME = 'outbox_relay' THEN
        INSERT INTO demo_relay VALUES (NEW.id, NEW.name);
    ELSIF TG_TABLE_NAME = 'outbox_range' THEN
        INSERT INTO demo_lost_range VALUES (OLD.fence, OLD.relay_id, demo_unsettled(OLD));
    ELSE
        INSERT INTO demo_lost_claim VALUES (format('%s-%s-%s', OLD.event_id, OLD.destination, OLD.claim), OLD.claimed_by);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER demo_note AFTER INSERT ON outbox_relay FOR EACH ROW EXECUTE FUNCTION demo_note();
CREATE TRIGGER demo_note AFTER UPDATE ON outbox_range FOR EACH ROW WHEN (NEW.fence > OLD.fence) EXECUTE FUNCTION demo_note();
CREATE TRIGGER demo_note AFTER UPDATE ON outbox_delivery
    FOR EACH ROW WHEN (NEW.claim > OLD.claim AND OLD.claimed_by IS NOT NULL) EXECUTE FUNCTION demo_note();`

const logisticsTables = `
CREATE TABLE shipments (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    invoice         text NOT NULL, -- not unique: a doubled effect must show
    customer        text NOT NULL,
    idempotency_key text NOT NULL
)`

// openReceiver starts logistics and returns when it listens. Each life dies in the effect that
// dieAfter gives it; beyond the list, lives do not die by themselves.
func (s *stage) openReceiver(f faults, dieAfter ...int) error {
	s.network.faults = f
	s.receiver = &process.Unit{Role: logisticsName}
	s.receiver.Launch = func(_ string, number int) process.Command {
		argv := []string{s.Self, logisticsName, "--database", s.Server.DSN(logisticsName) + "&pool_max_conns=16"}
		if number <= len(dieAfter) {
			argv = append(argv, "--die-after", strconv.Itoa(dieAfter[number-1]))
		}
		return process.Command{Argv: argv, Env: []string{"DEMO_SECRET=" + s.Secret}, Stdout: func(addr string) { s.network.receiver.Store(&addr) }}
	}
	s.receiver.Ended = func(life string) {
		s.note("died", life)
		if s.onDeath != nil && !s.network.calm.Load() {
			s.onDeath()
		}
	}
	s.Fill(s.receiver)
	return s.Poll(patience, "logistics to listen", func(context.Context) (bool, error) { return s.network.receiver.Load() != nil, nil })
}

// issue runs finance and returns when everything is issued.
func (s *stage) issue(o order) error {
	o.Database, o.Seed = s.Server.DSN(financeName), s.network.seed
	text, _ := json.Marshal(o) // plain fields always encode
	return process.Run(s.Ctx, process.Command{Argv: []string{s.Self, financeName, string(text)}, Stdout: func(key string) { s.note("rolled back", key) }})
}

// issueMeanwhile is issue beside what the caller does. The channel says how it ended.
func (s *stage) issueMeanwhile(o order) <-chan error {
	issued := make(chan error, 1)
	s.Go(func(context.Context) error {
		issued <- s.issue(o)
		return nil
	})
	return issued
}

const insertNote = `INSERT INTO demo_note (what, name) VALUES ($1, $2) ON CONFLICT DO NOTHING`

// note notes what was done to an invoice or a life.
func (s *stage) note(what, name string) {
	if _, err := s.finance.Exec(s.Ctx, insertNote, what, name); err != nil {
		s.Fail(fmt.Errorf("note that %s %s: %w", name, what, err))
	}
}

const selectDrained = `
SELECT NOT EXISTS (SELECT FROM outbox_delivery WHERE status = 'pending') AND NOT EXISTS (SELECT FROM outbox_range WHERE ended_at IS NULL)
   AND NOT EXISTS (SELECT FROM outbox WHERE NOT outbox_is_routed(id))`

// drained waits until every event is routed, and nothing is pending.
func (s *stage) drained(patience time.Duration) error {
	return s.Poll(patience, "the backlog to drain", func(ctx context.Context) (bool, error) {
		return process.One[bool](ctx, s.finance, selectDrained)
	})
}

// close ends all processes, stops PostgreSQL and removes it. It returns what went wrong on the way.
func (s *stage) close() error {
	s.End()
	s.network.close()
	return s.Close()
}
