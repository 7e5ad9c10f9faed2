package send

import (
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/spans"
)

// An Attempt is one POST.
type Attempt struct {
	EventID     int64
	Destination string
	Number      int // 1 for the first
	StatusCode  int // 0 without a response
	Outcome     policy.Outcome
	Reason      policy.Reason
	Duration    time.Duration
	// Duplicate: delivered, and the receiver says that it had the message already. Only streams say
	// so.
	Duplicate bool
	// DroppedHeaders counts the headers of the event that the destination does not let through, see
	// [post.Wire].
	DroppedHeaders int
	// Batch is how many events the request carried, said of one of them; 0 of the others, and of a
	// request for one event alone.
	Batch int
	// Class is live, backlog or replay; see [Classes].
	Class string
	// SinceFirstDue and SinceDue are the times from when the event became due (its created_at, or a
	// later available_at), and from when this attempt became due, until the attempt ended. The
	// database's clock dates both. Never negative.
	SinceFirstDue, SinceDue time.Duration
}

// recordAttempt ends the trace of an attempt, logs it, and calls the hook.
func (s *Senders) recordAttempt(d *lane.Delivery, decided *policy.Decision, started time.Time, took time.Duration) {
	level := zerolog.InfoLevel
	switch decided.Outcome {
	case policy.Delivered: // too many
		level = zerolog.DebugLevel
	case policy.Fail:
		level = zerolog.WarnLevel
	}
	line := s.Log.WithLevel(level).Int64("event_id", d.EventID).Str("destination", d.Destination).Int("attempt", d.Attempts+1).
		Str("outcome", string(decided.Outcome)).Str("reason", string(decided.Reason)).Int("http_status", decided.StatusCode).
		Int64("duration_ms", took.Milliseconds())
	if decided.Outcome == policy.Retry {
		line = line.Int64("next_attempt_in_ms", decided.Delay.Milliseconds())
	}
	if decided.Message != "" {
		line = line.Str("error", decided.Message)
	}
	line.Msg("attempt")
	ended := started.Add(took)
	if d.Span != nil {
		spans.End(d.Span, *decided, ended)
	}
	sinceFirstDue := since(d, d.FirstDue, ended)
	if d.Event.EventType != nil { // else the event is gone
		latency := sinceFirstDue
		if d.Replay { // the time until an operator replayed it says nothing about deliveries
			latency = history.NoLatency
		}
		s.History.Attempted(history.Key{Destination: d.Destination, EventType: *d.Event.EventType}, decided.Outcome, took, latency)
	}
	if hook := s.Attempted; hook != nil {
		hook(Attempt{
			EventID: d.EventID, Destination: d.Destination, Number: d.Attempts + 1, StatusCode: decided.StatusCode, Outcome: decided.Outcome,
			Reason: decided.Reason, Duration: took, Duplicate: decided.Duplicate, DroppedHeaders: decided.DroppedHeaders, Batch: decided.Batch,
			Class:         d.Class.String(),
			SinceFirstDue: sinceFirstDue, SinceDue: since(d, d.NextAttemptAt, ended),
		})
	}
}

// since returns the time from at, by the database's clock, to now, by this process's; 0 if at is
// unknown. The claim dated the promise by both clocks, which shows how they differ.
func since(d *lane.Delivery, at pgtype.Timestamptz, now time.Time) time.Duration {
	if !at.Valid || at.InfinityModifier != pgtype.Finite {
		return 0
	}
	return max(0, now.Sub(d.PromiseEnds.Add(at.Time.Sub(d.NotAfter))))
}
