package consumer

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Config says whom a middleware trusts and what it remembers. The zero value is refused, because it trusts no sender: set
// Secrets, or Verify for a sender that signs in a way of its own, or AllowUnsigned on a network that is trusted as a whole.
type Config struct {
	// Secrets are the signing secrets shared with the sender, each "whsec_" and 24 to 64 bytes in base64. A request that
	// any of them verifies is accepted, so to rotate without losing a request: add the new one here, then let the sender
	// switch, then remove the old one. Required unless Verify or AllowUnsigned is set.
	Secrets []string

	// AllowUnsigned accepts requests without looking at signatures. Any program that reaches the handler's address can then cause
	// its effects, and can spend a key so that the real event is taken for a duplicate. Why a handler failed is not answered then, but
	// logged. Default false. Excludes Secrets.
	AllowUnsigned bool

	// AcceptForeign also accepts plain Standard Webhooks senders, whose signature covers webhook-id, the timestamp and
	// the body only. For them webhook-id is the key and no other header is believed: [Event] holds nothing else. A
	// webhook-id of the form that outbox-relay derives ("evt_" and 32 hexadecimal digits) is still refused without the
	// stronger signature, since it is a relay's request with its headers changed. Default false: relays only.
	AcceptForeign bool

	// Verify takes the place of the signatures above, for a sender that signs in a way of its own, such as Stripe's
	// "t=…,v1=…" header. Nil: a relay's signature is required. Excludes Secrets, AllowUnsigned and AcceptForeign.
	Verify VerifyFunc

	// Receiver names what receives: events are remembered for it, and not for others in the same database. Two handlers that get
	// the same events need two names, or each would take the other's for duplicates. 1 to 255 printable ASCII characters.
	// Required. Never rename one: all its past events would count as new.
	Receiver string

	// Source names the sender, so that equal keys of two senders are two events. 1 to 255 printable ASCII characters; default
	// "outbox". Give every sender its own, and never rename one: all its past events would count as new.
	Source string

	// Destinations are this receiver's names among the destinations of its senders' relays. A request that a relay signed for another
	// destination is refused: without them, who is sent events could send them on to any receiver with the same secret. An event that
	// comes from two of them, such as over HTTP and by a stream, is a duplicate. Nil: any destination is accepted, which does no harm
	// where each has a secret of its own, and an event that comes from a second one is refused.
	Destinations []string

	// Tolerance is how far a request's timestamp may lie from this machine's clock, in either direction. Default 5
	// minutes, as in Standard Webhooks. Shorter refuses requests when clocks drift; longer lets a captured request be
	// sent again for longer, which the key turns into a duplicate as long as its row is kept. By as much may the clocks of
	// the sender's and the receiver's database differ before an event that was forgotten is taken for a new one.
	Tolerance time.Duration

	// SenderNotAfter is how long after its first request the sender may send an event again. A relay says so in each
	// request (30 days by default); for other senders it stands in their documentation. The row of an event whose sender
	// does not say it is kept for at least that long, whatever prunes. 0: not known.
	SenderNotAfter time.Duration

	// MaxBodyBytes bounds the request body; beyond it the answer is 413 and the relay fails the delivery at once. Default
	// 1 MiB, the largest payload a producer may enqueue. The body is held in memory while the handler runs.
	MaxBodyBytes int64

	// BodyTimeout bounds how long the body of a request may take to arrive; then the answer is 408 and the connection is closed.
	// It takes the place of the server's ReadTimeout while the body is read. Default 10 seconds. It has no effect, and the log says
	// so, behind a middleware whose ResponseWriter has no method Unwrap: then set the server's ReadTimeout.
	BodyTimeout time.Duration

	// MaxUnverifiedBytes bounds the memory that bodies hold together before they have proven where they come from. Beyond it
	// a request waits for the others, and is answered 503 at the end of BodyTimeout; one of up to 4 KiB never waits. Default
	// 8 MiB, or twice MaxBodyBytes if that is more.
	MaxUnverifiedBytes int64

	// Isolation is the transaction's isolation level: sql.LevelDefault (the database's default), LevelReadCommitted,
	// LevelRepeatableRead or LevelSerializable. Under the last two a conflict surfaces as 503 with Retry-After, and the
	// sender's retry runs the handler again.
	Isolation sql.IsolationLevel

	// HandlerTimeout is when the handler's context ends. The database ends a statement of a handler that does not obey it, and the
	// transaction if it is left idle, when that has lasted for CommitTimeout more: nothing of it is committed, and the next
	// attempt runs. Default 1 minute.
	HandlerTimeout time.Duration

	// CommitTimeout bounds storing the status and COMMIT, which run even when the client has gone, and ROLLBACK. Default 10
	// seconds. A commit that takes longer is answered with 500; whether it happened shows when the request comes again.
	CommitTimeout time.Duration

	// Redact removes what only the application knows to be private, such as names, from the text of a handler's error
	// before it is stored, logged or answered. Nil removes nothing. Afterwards credentials that can be recognised are
	// masked in any case, and the text is cut to 1 KiB. Called concurrently. Observe gets the error
	// as it is.
	Redact func(text string) string

	// Breaker answers 503 at once while what the handler depends on is down, so that a relay holds its events instead of
	// spending attempts on them. Give one Breaker to all middlewares whose handlers depend on the same thing. Nil: every
	// request is tried.
	Breaker *breaker.Breaker

	// Observe is called once for every request, when its outcome is final and before the answer is written, and once for every
	// attempt of an inbox's worker, when its outcome is committed: count and measure here. ctx is the request's, or one that
	// outlives the attempt. It is called concurrently, on the goroutine of the request or the worker, and must not block.
	// The module consumer/promobserver has one for Prometheus. Nil: nothing is called.
	Observe func(ctx context.Context, report Report)

	// Logger receives what an operator must act on: failed commits, an unreachable database, panics, reused keys; as
	// information each event that is ignored and each request that is refused; and all else for debugging. It gets source, key
	// and type of an event, never payloads, other headers or secrets. Nil is slog.Default() at the time of each message.
	Logger *slog.Logger
}

// settings are a Config that has been checked and completed.
type settings struct {
	Config
	shared     memory.Settings // what of it memories need
	secrets    []webhook.Secret
	unverified *budget // MaxUnverifiedBytes
}

// complete checks c and fills in defaults, so that a mistake shows at start and not when the first event arrives.
func (c Config) complete() (*settings, error) {
	s := &settings{Config: c}
	for i, text := range c.Secrets {
		secret, err := webhook.ParseSecret(text)
		if err != nil {
			return nil, fmt.Errorf("consumer: Config.Secrets[%d]: %w", i, err)
		}
		s.secrets = append(s.secrets, secret)
	}
	s.Secrets = nil // from here on only in a form that cannot be printed
	switch {
	case c.Verify != nil && (len(s.secrets) > 0 || c.AllowUnsigned || c.AcceptForeign):
		return nil, errors.New("consumer: Config has Verify beside Secrets, AllowUnsigned or AcceptForeign: they would be ignored; set Verify alone")
	case c.Verify != nil:
	case len(s.secrets) == 0 && !c.AllowUnsigned:
		return nil, errors.New("consumer: Config.Secrets is empty: anyone could cause effects; set it, or Verify for a sender with signatures of its own, or AllowUnsigned on a trusted network")
	case len(s.secrets) > 0 && c.AllowUnsigned:
		return nil, errors.New("consumer: Config has both Secrets and AllowUnsigned: the secrets would be ignored; set one of them")
	}
	switch c.Isolation {
	case sql.LevelDefault, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable:
	default:
		return nil, fmt.Errorf("consumer: Config.Isolation: %v is not a level of PostgreSQL", c.Isolation)
	}

	switch {
	case s.Receiver == "":
		return nil, errors.New(`consumer: Config.Receiver is empty: name what receives, such as "shipping", differently from all others that share its database`)
	case !headers.Printable(s.Receiver):
		return nil, fmt.Errorf("consumer: Config.Receiver: %q is not 1 to %d printable ASCII characters", s.Receiver, headers.MaxTextBytes)
	}
	if s.Source == "" {
		s.Source = "outbox"
	}
	if !headers.Printable(s.Source) {
		return nil, fmt.Errorf("consumer: Config.Source: %q is not 1 to %d printable ASCII characters", s.Source, headers.MaxTextBytes)
	}
	if err := s.completeLimits(); err != nil {
		return nil, err
	}
	s.shared = memory.Settings{
		Receiver: s.Receiver, Source: s.Source, Tolerance: s.Tolerance, SenderNotAfter: s.SenderNotAfter,
		Destinations: s.Destinations, HandlerTimeout: s.HandlerTimeout, CommitTimeout: s.CommitTimeout, Isolation: s.Isolation, Redact: s.Redact, Log: s.Logger,
	}
	return s, nil
}

// completeLimits checks durations and sizes and fills in their defaults.
func (s *settings) completeLimits() error {
	if err := memory.OrDefault("consumer: Config.MaxBodyBytes", &s.MaxBodyBytes, 1<<20); err != nil {
		return err
	}
	if err := cmp.Or(
		memory.OrDefault("consumer: Config.Tolerance", &s.Tolerance, 5*time.Minute),
		memory.OrDefault("consumer: Config.BodyTimeout", &s.BodyTimeout, 10*time.Second),
		memory.OrDefault("consumer: Config.MaxUnverifiedBytes", &s.MaxUnverifiedBytes, max(8<<20, 2*s.MaxBodyBytes)),
		memory.OrDefault("consumer: Config.HandlerTimeout", &s.HandlerTimeout, time.Minute),
		memory.OrDefault("consumer: Config.CommitTimeout", &s.CommitTimeout, 10*time.Second),
		memory.OrDefault("consumer: Config.SenderNotAfter", &s.SenderNotAfter, 0),
	); err != nil {
		return err
	}
	if s.MaxUnverifiedBytes < 2*s.MaxBodyBytes {
		return fmt.Errorf("consumer: Config.MaxUnverifiedBytes is %d, less than twice MaxBodyBytes (%d): the largest body could not be read", s.MaxUnverifiedBytes, s.MaxBodyBytes)
	}
	s.unverified = newBudget(s.MaxUnverifiedBytes)
	return nil
}
