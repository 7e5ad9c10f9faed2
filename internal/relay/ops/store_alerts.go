package ops

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// ErrNoAlert says that no such alert is open.
var ErrNoAlert = errors.New("no such alert is open; see: outbox-relay status")

// ErrUnknownRule says that there is no such rule of alerts.
var ErrUnknownRule = errors.New("there is no such rule")

// UnknownSubject says that nothing has the name that alerts are to be silenced about.
type UnknownSubject struct {
	Name  string
	Known []string
}

func (e UnknownSubject) Error() string {
	return fmt.Sprintf("no destination, relay or database that an alert may be about has the name %q", plain.Clip(e.Name))
}

// MaxSilence is for how long alerts can be silenced at most: what is silenced for ever is not
// watched.
const MaxSilence = 30 * 24 * time.Hour

const acknowledgeAlert = `
UPDATE outbox_alert SET acknowledged_by = coalesce(nullif($3, ''), session_user::text), due_at = now()
WHERE rule = $1 AND subject = $2 AND resolved_at IS NULL`

// AcknowledgeAlert notes that somebody deals with an open alert: it is not sent again until it
// returns, but its recovery is. The audit has it. The error wraps [ErrNoAlert] if it is not open.
func (o *Outbox) AcknowledgeAlert(ctx context.Context, rule, subject string) error {
	name, _ := o.actorOf()
	return o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, acknowledgeAlert, rule, subject, name)
		switch {
		case err != nil:
			return fmt.Errorf("acknowledge alert: %w", err)
		case tag.RowsAffected() == 0:
			return fmt.Errorf("%s of %q: %w", plain.Clip(rule), plain.Clip(subject), ErrNoAlert)
		}
		return o.record(ctx, tx, auditRow{action: "acknowledge_alert", detail: plain.Clip(rule + " " + subject)})
	})
}

const openReconcile = `
INSERT INTO outbox_alert AS a (rule, subject, level, detail) VALUES ($1, $2, $3, $4)
ON CONFLICT (rule, subject) DO UPDATE
SET last_at = now(), resolved_at = NULL, level = excluded.level, detail = excluded.detail,
    opened_at = CASE WHEN a.resolved_at IS NULL THEN a.opened_at ELSE now() END`

const endReconcile = `UPDATE outbox_alert SET resolved_at = now() WHERE rule = $1 AND subject = $2 AND resolved_at IS NULL`

// AlertReconciled opens the alert about a comparison with the receiver of a destination: problem
// says what it found, or why it could not be made. Nil ends the alert. Relays send it, as any
// other.
func (o *Outbox) AlertReconciled(ctx context.Context, destination string, findings int64, problem error) error {
	statement, args := endReconcile, []any{alert.RuleReconcile, destination}
	if problem != nil {
		statement, args = openReconcile, append(args, max(findings, 1), plain.Clip(problem.Error()))
	}
	if _, err := o.pool.Exec(ctx, statement, args...); err != nil {
		return fmt.Errorf("alert about the comparison: %w", err)
	}
	return nil
}

// What another session changes now is left to the next look of a relay.
const lockFailedAlerts = `
SELECT subject FROM outbox_alert WHERE rule = 'failed' AND resolved_at IS NULL ORDER BY subject FOR UPDATE SKIP LOCKED`

const endFailedAlerts = `
UPDATE outbox_alert a SET resolved_at = now()
WHERE a.rule = 'failed' AND a.subject = ANY ($1)
  AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.destination = a.subject AND d.status = 'failed')`

// endFailed ends the alerts about failed deliveries where none is left: the looks of relays, which
// end them too, are rarer on a busy database. What fails meanwhile waits for the lock, and opens
// its alert again.
func (o *Outbox) endFailed(ctx context.Context) error {
	return o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		locked, err := rows.Values[string](ctx, tx, "find alerts", lockFailedAlerts)
		if err != nil || len(locked) == 0 {
			return err
		}
		return pg.Exec(ctx, tx, "end alerts", endFailedAlerts, locked)
	})
}

const silenceAlerts = `
INSERT INTO outbox_alert_silence AS x (rule, subject, until, reason, created_by)
VALUES ($1, $2, now() + make_interval(secs => $3), $4, coalesce(nullif($5, ''), session_user::text))
ON CONFLICT (rule, subject) DO UPDATE
SET until = excluded.until, reason = excluded.reason, created_by = excluded.created_by, created_at = now()`

// What was silent becomes due when the silence ends before its time.
const dueAlerts = `UPDATE outbox_alert SET due_at = now() WHERE $1 IN ('', rule) AND $2 IN ('', subject)`

const removeSilences = `DELETE FROM outbox_alert_silence WHERE until <= now()`

const selectAlertSubjects = `
SELECT current_database()::text UNION SELECT subject FROM outbox_alert UNION SELECT subject FROM outbox_alert_past UNION SELECT subject FROM outbox_alert_silence`

// checkSubject returns an [UnknownSubject] for a name that no alert can be about, as far as the
// database knows.
func (o *Outbox) checkSubject(ctx context.Context, subject string) error {
	known, err := rows.Values[string](ctx, o.pool, "list subjects of alerts", selectAlertSubjects)
	if err != nil || slices.Contains(known, subject) {
		return err
	}
	destinations, err := o.Destinations(ctx)
	if err != nil {
		return err
	}
	relays, err := o.LifeSigns(ctx)
	if err != nil {
		return err
	}
	for _, r := range relays {
		known = append(known, r.Name, r.Called)
	}
	if known = append(known, destinations...); slices.Contains(known, subject) {
		return nil
	}
	return UnknownSubject{subject, known}
}

// SilenceAlerts keeps alerts from being sent for a while, as during maintenance; 0 or less ends it.
// An empty rule or subject stands for all. Recoveries of what was sent before are sent. The audit
// has it. The error wraps [ErrUnknownRule], or is an [UnknownSubject]: a misspelt name would
// silence nothing.
func (o *Outbox) SilenceAlerts(ctx context.Context, rule, subject string, lasting time.Duration, reason string) error {
	if rule != "" && !slices.Contains(alert.Rules(), rule) {
		return fmt.Errorf("%w %q; there are %s", ErrUnknownRule, plain.Clip(rule), strings.Join(alert.Rules(), ", "))
	}
	if subject != "" {
		if err := o.checkSubject(ctx, subject); err != nil {
			return err
		}
	}
	lasting = max(0, min(lasting, MaxSilence))
	name, _ := o.actorOf()
	return o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, silenceAlerts, rule, subject, lasting.Seconds(), plain.Clip(reason), name); err != nil {
			return fmt.Errorf("silence alerts: %w", err)
		}
		if _, err := tx.Exec(ctx, dueAlerts, rule, subject); err != nil {
			return fmt.Errorf("silence alerts: %w", err)
		}
		if _, err := tx.Exec(ctx, removeSilences); err != nil {
			return fmt.Errorf("silence alerts: %w", err)
		}
		about := strings.TrimSpace(orAll(rule, "all rules") + " of " + orAll(subject, "all subjects"))
		return o.record(ctx, tx, auditRow{action: "silence_alerts", detail: plain.Clip(fmt.Sprintf("%s for %s%s", about, plain.Span(lasting), labelled(": %s", reason)))})
	})
}

func orAll(name, all string) string {
	if name == "" {
		return all
	}
	return name
}

const selectSilences = `
SELECT rule, subject, until, reason, created_by FROM outbox_alert_silence WHERE until > now() ORDER BY until, rule, subject`

// A Silence keeps alerts from being sent.
type Silence struct {
	Rule      string    `json:"rule"`    // empty: all
	Subject   string    `json:"subject"` // empty: all
	Until     time.Time `json:"until"`
	Reason    string    `json:"reason"`
	CreatedBy string    `json:"created_by"`
}

// Silences lists what is silenced at present.
func (o *Outbox) Silences(ctx context.Context) ([]Silence, error) {
	return rows.Structs[Silence](ctx, o.pool, "list silences", selectSilences)
}
