package session

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// The session has its name before the row is visible, so that no other relay sees the row without
// its session.
const insertRelay = `
WITH r AS (
    INSERT INTO outbox_relay (name, version, lease, session_pid)
    VALUES ($1, $2, make_interval(secs => $3), CASE WHEN $4 THEN pg_backend_pid() END)
    RETURNING id
)
SELECT id, CASE WHEN $4 THEN set_config('application_name', ` + pg.NameOfSession + `, false) END,
       CASE WHEN ` + pg.QueueHasRoom + ` THEN pg_notify('outbox_wake', 'relay ' || current_schema()) END
FROM r`

// Register enters a new relay and returns its number. If q is its session, the relay lives as long
// as that lasts. Otherwise the relay is dead once its heartbeat is older than lease.
func Register(ctx context.Context, q pg.DB, isSession bool, name, version string, lease time.Duration) (relayID int32, err error) {
	if err := q.QueryRow(ctx, insertRelay, name, version, lease.Seconds(), isSession).Scan(&relayID, nil, nil); err != nil {
		return 0, fmt.Errorf("register relay: %w", err)
	}
	return relayID, nil
}

// resumeRelay is the statement of [resume].
const resumeRelay = `
UPDATE outbox_relay r
SET heartbeat_at = now(), session_pid = CASE WHEN $2 THEN pg_backend_pid() END, server_started_at = pg_postmaster_start_time(), asleep = false,
    lease = make_interval(secs => $3), reload_error = CASE WHEN NOT asleep THEN reload_error END, reload_failed_at = CASE WHEN NOT asleep THEN reload_failed_at END
WHERE id = $1
RETURNING CASE WHEN $2 THEN set_config('application_name', ` + pg.NameOfSession + `, false) END`

// resume lets a relay continue under its number, with q as its session if it has one. It returns
// false if the relay was taken for dead meanwhile: then the relay must register again.
func resume(ctx context.Context, q pg.DB, isSession bool, relayID int32, lease time.Duration) (resumed bool, err error) {
	err = q.QueryRow(ctx, resumeRelay, relayID, isSession, lease.Seconds()).Scan(nil)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("resume relay: %w", err)
	}
	return true, nil
}

// Beat is the statement of a heartbeat.
//
// A beat is late when this relay's own heartbeat is two beats older than it may become: then the
// database stood still, or its clock was set. A higher limit would miss standstills after which the
// heartbeat of another relay, which may have been older, looks silent.
//
// The heartbeat is not written at every beat: no version of a row can be removed while some session
// keeps an old snapshot. The session reports most deaths sooner, see dead.go. While this relay is
// armed, a beat also keeps producers notifying.
const Beat = `
WITH written AS (
    UPDATE outbox_relay SET heartbeat_at = now() WHERE id = $1 AND heartbeat_at NOT BETWEEN now() - make_interval(secs => $2) AND now()
)
SELECT 'self', id, '', heartbeat_at NOT BETWEEN now() - make_interval(secs => $2 + 3) AND now() + interval '3 seconds', '', 0::float8, 0, 0 FROM outbox_relay WHERE id = $1
UNION ALL
SELECT 'dead', id, '', false, '', 0, 0, 0 FROM outbox_relay r
WHERE id <> $1 AND ` + serverIsUp + `
  AND ($3 AND ` + isSilent + ` OR $5 AND ` + isDisconnected + `)
UNION ALL
SELECT 'destination', 0, destination, false, breaker, coalesce(extract(epoch FROM breaker_until - now()), 0)::float8,
       coalesce(breaker_relay_id, 0), breaker_failures
FROM outbox_destination WHERE breaker <> 'closed' OR breaker_failures > 0
UNION ALL
SELECT 'resumed', 0, destination, false, '', 0, 0, 0 FROM outbox_relay_destination
WHERE relay_id = $1 AND destination = ANY ($6) AND wait_until = '-infinity'
UNION ALL
SELECT 'alert', 0, '', false, '', 0, 0, 0 WHERE ` + alert.AnyDue + `
UNION ALL
SELECT 'armed', 0, '', until < extract(epoch FROM now()) * 1000, '', 0, 0, 0 FROM (SELECT last_value AS until FROM outbox_armed OFFSET 0) a
WHERE CASE WHEN $4 AND until < extract(epoch FROM now() + interval '6 seconds') * 1000 THEN ` + armUntil + ` > 0 ELSE false END
UNION ALL
SELECT 'parked', 0, '', false, '', 0, 0, 0
WHERE EXISTS (SELECT FROM outbox_destination WHERE parked_after IS NOT NULL)
UNION ALL
SELECT 'calm', 0, '', false, '', 0, 0, 0
WHERE NOT EXISTS (SELECT FROM outbox_relay WHERE id <> $1) AND NOT EXISTS (SELECT FROM outbox_alert)
  AND NOT EXISTS (SELECT FROM outbox_destination WHERE breaker <> 'closed' OR breaker_failures > 0 OR parked_after IS NOT NULL)`

// pulse is what a beat asks.
type pulse struct {
	relayID          int32
	writeAfter       time.Duration // how old the heartbeat may become before it is written again
	findSilent       bool
	findDisconnected bool
	armed            bool     // continue making producers notify
	waits            []string // destinations that have asked this relay to wait
}

// echo is what a beat finds out.
type echo struct {
	registered bool    // false: this relay's own row is gone
	late       bool    // this relay's own heartbeat had become old: the others' may look old for the same reason
	dead       []int32 // each to be given to Rescue
	calm       bool    // no other relay is registered, and there is nothing that a beat could find soon
	News
}

// News is what a beat finds out about the database's state beside the relays.
type News struct {
	States  []policy.DestinationState // of destinations whose breaker is not closed, or that have evidence against them
	Resumed []string                  // destinations for which an operator has ended the wait that they had asked for
	Alerts  bool                      // there are alerts to send or to close
	Parked  bool                      // a route was added, and what was parked before has yet to be looked through
	Unheard bool                      // producers had stopped to notify: another relay has disarmed them, or this beat came late
}

// heartbeat says that this relay lives, and finds out what it has to do beside claiming.
func heartbeat(ctx context.Context, q pg.DB, p pulse) (e echo, err error) {
	rows, err := q.Query(ctx, Beat, p.relayID, p.writeAfter.Seconds(), p.findSilent, p.armed, p.findDisconnected, p.waits)
	if err != nil {
		return echo{}, fmt.Errorf("beat: %w", err)
	}
	var what string
	var relayID int32
	var late bool
	var state policy.DestinationState
	var remaining float64
	columns := []any{&what, &relayID, &state.Destination, &late, &state.Breaker, &remaining, &state.Owner, &state.Failures}
	_, err = pgx.ForEachRow(rows, columns, func() error {
		switch what {
		case "self":
			e.registered, e.late = true, late
		case "dead":
			e.dead = append(e.dead, relayID)
		case "destination":
			state.Remaining = time.Duration(remaining * float64(time.Second))
			e.States = append(e.States, state)
		case "resumed":
			e.Resumed = append(e.Resumed, state.Destination)
		case "alert":
			e.Alerts = true
		case "parked":
			e.Parked = true
		case "calm":
			e.calm = true
		case "armed":
			e.Unheard = late
		}
		return nil
	})
	if err != nil {
		return echo{}, fmt.Errorf("beat: %w", err)
	}
	return e, nil
}

// armUntil makes producers notify for the next 10 s: a relay that died armed must not cost them for
// longer. One that is asleep asks for a minute.
const armUntil = `setval('outbox_armed'::regclass, (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 10000)`

// Producers is whether producers notify, as this relay has declared. It is safe for concurrent use.
type Producers struct{ armed atomic.Bool }

// Armed reports whether producers notify, as was declared last.
func (p *Producers) Armed() bool { return p.armed.Load() }

// Other relays hear that producers notify again: an event that came meanwhile may be for one of
// them alone.
const arm = `SELECT CASE WHEN $1 THEN ` + armUntil + ` ELSE setval('outbox_armed'::regclass, 0) END,
       CASE WHEN $1 AND ` + pg.QueueHasRoom + ` THEN pg_notify('outbox_wake', current_schema()) END`

// Arm makes producers notify, or stops them. Another relay that is still armed makes them notify
// again at its next beat. If it fails, beats continue with what was declared before, as the claimer
// does: an armed relay whose beats do not keep producers notifying would wait for each safety tick.
func (p *Producers) Arm(ctx context.Context, db pg.DB, armed bool) error {
	before := p.armed.Load()
	p.armed.Store(before && armed) // no beat arms them meanwhile
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if _, err := db.Exec(ctx, arm, armed); err != nil {
		p.armed.Store(before)
		return fmt.Errorf("let producers notify: %w", err)
	}
	p.armed.Store(armed)
	return nil
}

// The lock is what a commit takes for its notifications, before it waits for the disk and for
// standbys.
const selectCommitsQueue = `
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'object' AND database = 0 AND classid = 'pg_database'::regclass AND objid = 0 AND NOT granted)`

// CommitsQueue reports whether commits that notify wait for each other.
func CommitsQueue(ctx context.Context, db pg.DB) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	return rows.Value[bool](ctx, db, "find out whether commits queue", selectCommitsQueue)
}

// listen makes a session receive the notifications of producers and relays.
const listen = `LISTEN outbox_wake`

const selectServer = `SELECT current_schema(), pg_postmaster_start_time()`

// The server's start tells clusters apart of which one is a copy of the other.
const selectWhereabouts = `
SELECT concat_ws('/', extract(epoch FROM pg_postmaster_start_time()), current_database(), 'outbox_relay'::regclass::oid)`

// whereabouts names the tables that a connection leads to.
func whereabouts(ctx context.Context, q pg.DB) (name string, err error) {
	return rows.Value[string](ctx, q, "find out where the connection leads", selectWhereabouts)
}
