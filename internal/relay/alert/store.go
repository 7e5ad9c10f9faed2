package alert

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

const (
	// holdFor is how long the relay that sends an alert to a channel keeps the others from doing
	// so. It outlasts alertTimeout and the statement that says it is sent.
	holdFor = 45 * time.Second
	// Retry is after which time a channel that failed is tried again.
	Retry = 30 * time.Second
)

// AnyDue is true when something may have to be done with an alert. An expression for the heartbeat,
// so that an idle relay asks nothing more.
const AnyDue = `EXISTS (SELECT FROM outbox_alert WHERE due_at <= now())`

// untried is [Untried] of an alert a. Of what failed it is no more than whether a pause keeps what
// is replayed: a 410 has paused the destination.
const untried = `CASE WHEN a.rule NOT IN ('breaker_open', 'failed') THEN ''
            WHEN EXISTS (SELECT FROM outbox_destination d WHERE d.destination = a.subject AND d.paused) THEN 'paused'
            WHEN a.rule = 'failed' THEN ''
            WHEN NOT EXISTS (SELECT FROM outbox_relay_destination s JOIN outbox_relay r ON r.id = s.relay_id WHERE s.destination = a.subject AND ` + pg.IsAlive + `) THEN 'unserved'
            WHEN (SELECT (` + pg.WaitUntil + `) FROM (VALUES (a.subject)) lane (destination)) IS NOT NULL THEN 'asked_to_wait' ELSE '' END`

// columns are the fields of an Alert a but for Pending and Source.
const columns = `a.rule, a.subject, a.count - a.counted_before, a.opened_at, coalesce(a.first_event_id, 0), coalesce(a.first_error, ''),
       coalesce(CASE WHEN a.rule = 'breaker_open' THEN (SELECT d.breaker_error FROM outbox_destination d WHERE d.destination = a.subject AND d.breaker <> 'closed') END, ''),
       coalesce(a.detail, ''), a.resolved_at, a.returned, a.began_at, coalesce(a.acknowledged_by, ''), ` + silentUntil + `, current_database()::text,
       ` + untried

const silentUntil = `(SELECT max(x.until) FROM outbox_alert_silence x
        WHERE x.rule IN ('', a.rule) AND x.subject IN ('', a.subject) AND x.until > now())`

// stateColumns are the fields of the State of an alert a and the notice n of a channel, but for the
// rule, and the time.
const stateColumns = `a.opened_at, a.resolved_at, a.returned, greatest(a.level, a.count - a.counted_before), a.acknowledged_by IS NOT NULL,
       ` + silentUntil + `, n.sent_at, coalesce(n.sent_level, 0), n.claimed_until IS NOT NULL, n.claimed_until, now()`

// stored scans stateColumns.
type stored struct {
	State
	resolved, silent, sent, busy *time.Time
	now                          time.Time
}

func (s *stored) targets() []any {
	return []any{&s.OpenedAt, &s.resolved, &s.Returned, &s.Level, &s.Acknowledged, &s.silent, &s.sent, &s.SentLevel, &s.Tried, &s.busy, &s.now}
}

// state returns the State that was scanned.
func (s *stored) state() State {
	for _, t := range []struct {
		to   *time.Time
		from *time.Time
	}{{&s.ResolvedAt, s.resolved}, {&s.SilentUntil, s.silent}, {&s.SentAt, s.sent}, {&s.BusyUntil, s.busy}} {
		if t.from != nil {
			*t.to = *t.from
		}
	}
	return s.State
}

const selectOpen = `
SELECT ` + columns + `, 0::bigint
FROM outbox_alert a WHERE a.resolved_at IS NULL ORDER BY a.opened_at, a.rule, a.subject`

// Open lists the alerts that are open.
func Open(ctx context.Context, q pg.DB) ([]Alert, error) {
	return rows.Structs[Alert](ctx, q, "list alerts", selectOpen)
}

// A Past is an alert that has ended: the last incident of one that returned.
type Past struct {
	Rule           string    `json:"rule"`
	Subject        string    `json:"subject"`
	BeganAt        time.Time `json:"began_at"`
	ResolvedAt     time.Time `json:"resolved_at"`
	Returned       int       `json:"returned"` // how often its condition returned soon after its end
	Count          int64     `json:"count"`
	FirstEventID   int64     `json:"first_event_id,string"` // 0: none
	FirstError     string    `json:"first_error"`
	Detail         string    `json:"detail"`
	AcknowledgedBy string    `json:"acknowledged_by"`
	// Notices says which channels were sent it; none: it ended before it was due, or was silenced.
	Notices []Notice `json:"notices"`
}

// A Notice is when a channel was first sent an alert since it returned last, and its end; nil: not.
type Notice struct {
	Channel string     `json:"channel"`
	SentAt  *time.Time `json:"sent_at"`
	EndedAt *time.Time `json:"ended_at"`
}

// noticesOf an alert c are those that were sent, as outbox_alert_past stores them.
const noticesOf = `(
    SELECT coalesce(jsonb_agg(jsonb_build_object('channel', n.channel, 'sent_at', n.first_sent_at, 'ended_at', n.ended_sent_at) ORDER BY n.channel), '[]')
    FROM outbox_alert_notice n WHERE n.rule = c.rule AND n.subject = c.subject AND n.first_sent_at IS NOT NULL)`

// One that has just ended is kept as long as it may return.
const selectPast = `
SELECT rule, subject, began_at, resolved_at, returned, count, coalesce(first_event_id, 0), coalesce(first_error, ''), coalesce(detail, ''),
       coalesce(acknowledged_by, ''), notices
FROM ((SELECT rule, subject, began_at, resolved_at, returned, count, first_event_id, first_error, detail, acknowledged_by, notices
       FROM outbox_alert_past ORDER BY resolved_at DESC, id DESC LIMIT 50)
      UNION ALL
      SELECT c.rule, c.subject, c.opened_at, c.resolved_at, c.returned, c.count - c.counted_before, c.first_event_id, c.first_error, c.detail, c.acknowledged_by, ` + noticesOf + `
      FROM outbox_alert c WHERE c.resolved_at IS NOT NULL) past
ORDER BY resolved_at DESC, rule, subject LIMIT 50`

// Ended lists the 50 alerts that ended last, within two weeks. One that returns within minutes is
// open again, and no longer among them.
func Ended(ctx context.Context, q pg.DB) ([]Past, error) {
	return rows.Structs[Past](ctx, q, "list alerts that have ended", selectPast)
}

// A candidate is an alert that may have to be sent to a channel.
type candidate struct {
	rule, subject, channel string
	dueAt                  time.Time
	stored
}

// A copy of the database has the original's alerts too, so a relay that is not sure where it is
// sends only that.
const selectDue = `
SELECT a.rule, a.subject, c.channel, a.due_at, ` + stateColumns + `
FROM (SELECT * FROM outbox_alert WHERE due_at <= now() AND ($2 OR rule = 'quarantined') ORDER BY due_at, rule, subject LIMIT 1000) a
CROSS JOIN unnest($1::text[]) AS c (channel)
LEFT JOIN outbox_alert_notice n ON n.rule = a.rule AND n.subject = a.subject AND n.channel = c.channel
ORDER BY a.opened_at, a.rule, a.subject`

// due returns what may have to be sent, for each of the channels; not all: only of quarantines.
func (s *Sender) due(ctx context.Context, channels []string, all bool) (list []candidate, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	rows, err := s.DB.Query(ctx, selectDue, channels, all)
	if err != nil {
		return nil, fmt.Errorf("find due alerts: %w", err)
	}
	list, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (c candidate, err error) {
		err = row.Scan(append([]any{&c.rule, &c.subject, &c.channel, &c.dueAt}, c.targets()...)...)
		c.Rule = c.rule
		return c, err
	})
	if err != nil {
		return nil, fmt.Errorf("find due alerts: %w", err)
	}
	return list, nil
}

// The alert's row is only kept from being removed: relays that send to several channels do not wait
// for each other.
const claimNotice = `
WITH a AS MATERIALIZED (
    SELECT * FROM outbox_alert WHERE rule = $1 AND subject = $2 FOR KEY SHARE SKIP LOCKED
), n AS (
    INSERT INTO outbox_alert_notice AS n (rule, subject, channel, claimed_until)
    SELECT rule, subject, $3, now() + make_interval(secs => $4) FROM a
    ON CONFLICT (rule, subject, channel) DO UPDATE SET claimed_until = excluded.claimed_until
    WHERE coalesce(n.claimed_until <= now(), true)
    RETURNING n.*
)
SELECT ` + columns + `,
       CASE WHEN a.rule IN ('breaker_open', 'lag', 'misconfigured', 'failing', 'paused', 'failed') THEN (SELECT count(*) FROM (VALUES (a.subject)) ` + pg.PendingOf + `) ELSE 0 END,
       ` + stateColumns + `
FROM a CROSS JOIN n`

// A notice is an alert with news for one channel, held by this relay until it has been sent or the
// hold ends.
type notice struct {
	Alert
	state State
	now   time.Time
}

// claim holds an alert for one channel and returns it as it is now. It returns false if another
// relay holds it, or it is gone.
func (s *Sender) claim(ctx context.Context, c *candidate) (n notice, claimed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var now stored
	err = s.DB.QueryRow(ctx, claimNotice, c.rule, c.subject, c.channel, holdFor.Seconds()).Scan(append([]any{
		&n.Rule, &n.Subject, &n.Count, &n.OpenedAt, &n.FirstEventID, &n.FirstError, &n.LastError, &n.Detail, &n.ResolvedAt, &n.Returned, &n.BeganAt,
		&n.AcknowledgedBy, &n.SilentUntil, &n.Database, &n.Untried, &n.Pending,
	}, now.targets()...)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return notice{}, false, nil
	}
	if err != nil {
		return notice{}, false, fmt.Errorf("claim alert: %w", err)
	}
	n.state, n.now = now.state(), now.now
	n.state.Rule, n.state.Tried, n.state.BusyUntil = n.Rule, c.Tried, time.Time{} // they were this claim's
	return n, true, nil
}

const recordNotice = `
UPDATE outbox_alert_notice
SET sent_at = CASE $4 WHEN 'lasts' THEN now() WHEN 'ended' THEN NULL ELSE sent_at END,
    first_sent_at = CASE WHEN $4 = 'lasts' AND sent_at IS NULL THEN now() ELSE first_sent_at END,
    ended_sent_at = CASE WHEN $4 = 'ended' THEN now() WHEN $4 = 'lasts' AND sent_at IS NULL THEN NULL ELSE ended_sent_at END,
    sent_level = CASE $4 WHEN 'lasts' THEN $5 ELSE sent_level END,
    claimed_until = CASE WHEN $6::float8 IS NOT NULL THEN now() + make_interval(secs => $6) END
WHERE rule = $1 AND subject = $2 AND channel = $3`

// What became of a notice.
const (
	sentLasts   = "lasts" // the channel knows that the condition lasts
	sentEnded   = "ended" // the channel knows that it has ended
	sentNothing = ""
)

// record writes what became of a notice, and gives it back: at once, or after a while.
func (s *Sender) record(ctx context.Context, channel string, n notice, sent string, heldFor *time.Duration) error {
	var seconds *float64
	if heldFor != nil {
		held := heldFor.Seconds()
		seconds = &held
	}
	return pg.Exec(ctx, s.DB, "record alert", recordNotice, n.Rule, n.Subject, channel, sent, n.state.Level, seconds)
}

// An alert that has changed since it was read is left alone: the change has made it due again. So
// is one that is locked.
const schedule = `
WITH seen AS MATERIALIZED (
    SELECT a.rule, a.subject, p.next_at, p.over, p.sent
    FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::bool[], $6::bool[]) AS p (rule, subject, due_at, next_at, over, sent)
    JOIN outbox_alert a ON a.rule = p.rule AND a.subject = p.subject AND a.due_at = p.due_at
    FOR NO KEY UPDATE OF a SKIP LOCKED
), closed AS (
    DELETE FROM outbox_alert a USING seen s WHERE a.rule = s.rule AND a.subject = s.subject AND s.over RETURNING a.*
), past AS (
    INSERT INTO outbox_alert_past (rule, subject, began_at, resolved_at, returned, count, first_event_id, first_error, detail, acknowledged_by, notices)
    SELECT c.rule, c.subject, c.opened_at, coalesce(c.resolved_at, now()), c.returned, c.count - c.counted_before, c.first_event_id, c.first_error, c.detail,
           c.acknowledged_by, ` + noticesOf + `
    FROM closed c
), forgotten AS (
    DELETE FROM outbox_alert_past WHERE resolved_at < now() - interval '14 days' AND EXISTS (SELECT FROM closed)
)
UPDATE outbox_alert a
SET due_at = s.next_at, notified_count = CASE WHEN s.sent THEN a.count ELSE a.notified_count END
FROM seen s WHERE a.rule = s.rule AND a.subject = s.subject AND NOT s.over`

// schedule notes when something is to be done next with each alert that is due, and removes those
// that are over.
func (s *Sender) schedule(ctx context.Context, all bool) error {
	list, err := s.due(ctx, s.channelNames(), all)
	if err != nil || len(list) == 0 {
		return err
	}
	var rules, subjects []string
	var dueAt []time.Time
	var next []*time.Time
	var over, sent []bool
	policy := s.Config().Policy()
	for i := range list {
		c := &list[i]
		step := policy.Decide(c.now, c.state())
		if step.Send {
			step.Next = c.dueAt // it became due meanwhile. A later time could be in the future of who looks at this moment
		}
		last := len(rules) - 1
		if last < 0 || rules[last] != c.rule || subjects[last] != c.subject {
			rules, subjects, dueAt = append(rules, c.rule), append(subjects, c.subject), append(dueAt, c.dueAt)
			next, over, sent = append(next, nil), append(over, true), append(sent, false)
			last++
		}
		if at := step.Next; !at.IsZero() && (next[last] == nil || at.Before(*next[last])) {
			next[last] = &at
		}
		over[last] = over[last] && step.Over
		sent[last] = sent[last] || !c.SentAt.IsZero()
	}
	return pg.Exec(ctx, s.DB, "schedule alerts", schedule, rules, subjects, dueAt, next, over, sent)
}
