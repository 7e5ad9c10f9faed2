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

// Config says who receives, whom to trust, and what limits hold. Receiver and Secrets are required;
// most programs set Source too, and nothing else. The zero value is refused, because it trusts no
// sender. A Config is copied by the function that takes it, and may be used for several receivers.
type Config struct {
	// Receiver names this receiver. Events are remembered under this name, so receivers that share
	// a database do not disturb each other. Two handlers that get the same events need two names:
	// otherwise each takes the other's events for duplicates. 1 to 255 printable ASCII characters.
	// Required. Never rename a receiver: all its past events would count as new.
	Receiver string

	// Source names the sender, so that equal keys of two senders are two events. 1 to 255 printable
	// ASCII characters. Default "outbox". Give each sender its own name, and never rename it: all
	// its past events would count as new.
	Source string

	// Secrets are the signing secrets shared with the sender, each "whsec_" and 24 to 64 bytes in
	// base64. A request is accepted if one of them verifies it. To rotate without losing a request:
	// add the new one here, then let the sender switch, then remove the old one. Required, unless
	// Verify.Custom or Verify.AllowUnsigned is set.
	Secrets []string

	// Destinations are this receiver's names among the destinations of its senders' relays. A
	// request that a relay signed for another destination is refused with 421: otherwise a receiver
	// with the same secret could forward its events to this one. An event that comes from two of
	// the names, such as over HTTP and by a stream, is a duplicate. Nil accepts any destination,
	// which is safe where each destination has its own secret. An event that comes from a second
	// destination is then refused.
	Destinations []string

	// SenderNotAfter is how long after its first request the sender may send an event again. Relays
	// say so in each request (30 days by default). The documentation of other senders says it. The
	// row of an event whose sender does not say it is kept for at least this long, whatever prunes.
	// 0: not known.
	SenderNotAfter time.Duration

	// Verify says what proves a request, beside Secrets. The zero value accepts signed requests of
	// relays only.
	Verify Verify

	// Limits bound what a request may cost. The zero value has defaults that suit most receivers.
	Limits Limits

	// Isolation is the isolation level of the handler's transaction: sql.LevelDefault (the
	// database's default), LevelReadCommitted, LevelRepeatableRead or LevelSerializable. Under the
	// last two, a conflict is answered with 503 and Retry-After, and the sender's retry runs the
	// handler again.
	Isolation sql.IsolationLevel

	// Breaker answers 503 at once while what the handler depends on is down. A relay then holds its
	// events and spends no attempts on them. Give one Breaker to all receivers whose handlers
	// depend on the same thing. Nil: every request is tried.
	Breaker *breaker.Breaker

	// Redact removes what only the application knows to be private, such as names, from the text of
	// a handler's error before it is stored, logged or answered. It is called concurrently. Nil
	// removes nothing. Credentials that can be recognised are masked afterwards in any case, and
	// the text is cut to 1 KiB. Observe gets the error unchanged.
	Redact func(text string) string

	// Observe is called once for every request, when its outcome is final and before the answer is
	// written. It is also called once for every attempt of an inbox's worker, when its outcome is
	// committed. Count and measure here; the module consumer/promobserver does so for Prometheus.
	// ctx is the request's, or one that outlives the attempt. Observe is called concurrently, on
	// the goroutine of the request or the worker, and must not block. Nil: nothing is called.
	Observe func(ctx context.Context, report Report)

	// Logger receives what an operator must act on: failed commits, an unreachable database,
	// panics, reused keys. At level Info it gets each event that is ignored and each request that
	// is refused, and at level Debug the rest. It gets source, key and type of an event, never
	// payloads, other headers or secrets. Nil is slog.Default() at the time of each message.
	Logger *slog.Logger
}

// Verify says what proves a request to a receiver. In its zero value, that is a relay's signature
// with one of [Config].Secrets and a recent timestamp.
type Verify struct {
	// AllowUnsigned accepts requests without checking signatures. Any program that reaches the
	// receiver can then cause its effects, and can use a key first, so that the real event counts
	// as a duplicate. The answer does not say why a handler failed; the log does. Set it only on a
	// network that is trusted as a whole. Default false. Excludes Secrets.
	AllowUnsigned bool

	// AcceptForeign also accepts plain Standard Webhooks senders, whose signature covers only
	// webhook-id, the timestamp and the body. For them webhook-id is the key, and no other header
	// is believed: [Event] holds nothing else, and the handler of an HTTP request gets no header
	// that a relay would have signed (X-Outbox-…, X-Event-…, Ce-…). A webhook-id of the form that
	// outbox-relay derives ("evt_" and 32 hexadecimal digits) is refused without the relay's own
	// signature, because it is a relay's request with changed headers. Default false: relays only.
	AcceptForeign bool

	// Custom replaces all checks of signatures and timestamps, for a sender that signs in its own
	// way, such as Stripe's "t=…,v1=…" header. Nil: a relay's signature is required. Excludes
	// Secrets, AllowUnsigned and AcceptForeign.
	Custom VerifyFunc

	// Tolerance is how far a request's timestamp may lie from this machine's clock, in either
	// direction. Default 5 minutes, as in Standard Webhooks. A shorter one refuses requests when
	// clocks drift. A longer one lets a captured request be sent again for longer; it counts as a
	// duplicate while the event's row is kept. The clocks of the sender's and the receiver's
	// databases may differ by as much before a forgotten event counts as new.
	Tolerance time.Duration
}

// Limits bound the memory and the time that requests may take. Zero fields have the defaults below;
// negative ones are refused.
type Limits struct {
	// MaxBodyBytes bounds the request body. A larger one is answered with 413, and the relay fails
	// the delivery at once. Default 1 MiB, the largest payload that a producer may enqueue. The
	// body is in memory while the handler runs.
	MaxBodyBytes int64

	// MaxUnverifiedBytes bounds the memory of all bodies together that are not verified yet. Beyond
	// it a request waits. Bodies of each magnitude get the same share of the room, and so do
	// senders that have been verified on their connection or from their address before. While one
	// waits, a body that arrives slower than 2 MiB a second loses its place, and is answered with
	// 503; so is one that waits until the end of BodyTimeout. A body of up to 4 KiB never waits.
	// Default 8 MiB, or twice MaxBodyBytes if that is more. Less than MaxBodyBytes is refused.
	MaxUnverifiedBytes int64

	// BodyTimeout bounds how long a request's body may take to arrive. Then the answer is 408 and
	// the connection is closed. It replaces the server's ReadTimeout while the body is read.
	// Default 10 seconds. Behind a middleware whose ResponseWriter has no method Unwrap it has no
	// effect, and the log says so: set the server's ReadTimeout there.
	BodyTimeout time.Duration

	// HandlerTimeout is when the handler's context ends. If the handler does not obey it, the
	// database ends its running statement, or its idle transaction, after another CommitTimeout.
	// Nothing is committed then, and the next attempt runs. Default 1 minute.
	HandlerTimeout time.Duration

	// CommitTimeout bounds storing the status and COMMIT, which run even when the client has gone,
	// and ROLLBACK. Default 10 seconds. A commit that takes longer is answered with 500; the next
	// request with the key shows whether it happened.
	CommitTimeout time.Duration

	// BatchLocks is how long the events of a batch may hold the locks of those before them: others
	// wait for these, and may hold what is needed here. When it has passed, what is done so far is
	// committed, and the batch continues in another transaction. Default 250 ms.
	BatchLocks time.Duration
}

// settings are a Config that has been checked and completed.
type settings struct {
	Config
	shared     memory.Settings // what memories need of it
	secrets    []webhook.Secret
	unverified *budget // Limits.MaxUnverifiedBytes
	senders    senders
}

// complete checks c and fills in defaults, so that a mistake shows at start and not when the first
// event arrives.
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
	if err := s.checkTrust(); err != nil {
		return nil, err
	}
	s.Source = cmp.Or(s.Source, "outbox")
	switch {
	case s.Receiver == "":
		return nil, errors.New(`consumer: Config.Receiver is empty: name what receives, such as "shipping", differently from all others that share its database`)
	case !headers.Printable(s.Receiver):
		return nil, fmt.Errorf("consumer: Config.Receiver: %q is not 1 to %d printable ASCII characters", s.Receiver, headers.MaxTextBytes)
	case !headers.Printable(s.Source):
		return nil, fmt.Errorf("consumer: Config.Source: %q is not 1 to %d printable ASCII characters", s.Source, headers.MaxTextBytes)
	}
	switch c.Isolation {
	case sql.LevelDefault, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable:
	default:
		return nil, fmt.Errorf("consumer: Config.Isolation: %v is not a level of PostgreSQL", c.Isolation)
	}
	if err := s.completeLimits(); err != nil {
		return nil, err
	}
	s.shared = memory.Settings{
		Receiver: s.Receiver, Source: s.Source, Destinations: s.Destinations,
		Tolerance: s.Verify.Tolerance, SenderNotAfter: s.SenderNotAfter,
		HandlerTimeout: s.Limits.HandlerTimeout, CommitTimeout: s.Limits.CommitTimeout,
		Isolation: s.Isolation, Redact: s.Redact, Log: s.Logger,
	}
	return s, nil
}

// checkTrust refuses a Config that trusts no sender, or in two ways of which one would be ignored.
func (s *settings) checkTrust() error {
	v := s.Verify
	switch {
	case v.Custom != nil && (len(s.secrets) > 0 || v.AllowUnsigned || v.AcceptForeign):
		return errors.New("consumer: Config has Verify.Custom beside Secrets, AllowUnsigned or AcceptForeign: they would be ignored; set Verify.Custom alone")
	case v.Custom != nil:
	case len(s.secrets) == 0 && !v.AllowUnsigned:
		return errors.New("consumer: Config.Secrets is empty: anyone could cause effects; set it, or Verify.Custom for a sender with its own signatures, or Verify.AllowUnsigned on a trusted network")
	case len(s.secrets) > 0 && v.AllowUnsigned:
		return errors.New("consumer: Config has both Secrets and Verify.AllowUnsigned: the secrets would be ignored; set one of them")
	}
	return nil
}

// completeLimits checks durations and sizes and fills in their defaults.
func (s *settings) completeLimits() error {
	l := &s.Limits
	if err := memory.OrDefault("consumer: Config.Limits.MaxBodyBytes", &l.MaxBodyBytes, 1<<20); err != nil {
		return err
	}
	if err := cmp.Or(
		memory.OrDefault("consumer: Config.Verify.Tolerance", &s.Verify.Tolerance, 5*time.Minute),
		memory.OrDefault("consumer: Config.Limits.BodyTimeout", &l.BodyTimeout, 10*time.Second),
		memory.OrDefault("consumer: Config.Limits.MaxUnverifiedBytes", &l.MaxUnverifiedBytes, max(8<<20, 2*l.MaxBodyBytes)),
		memory.OrDefault("consumer: Config.Limits.HandlerTimeout", &l.HandlerTimeout, time.Minute),
		memory.OrDefault("consumer: Config.Limits.CommitTimeout", &l.CommitTimeout, 10*time.Second),
		memory.OrDefault("consumer: Config.Limits.BatchLocks", &l.BatchLocks, 250*time.Millisecond),
		memory.OrDefault("consumer: Config.SenderNotAfter", &s.SenderNotAfter, 0),
	); err != nil {
		return err
	}
	if l.MaxUnverifiedBytes < l.MaxBodyBytes {
		return fmt.Errorf("consumer: Config.Limits.MaxUnverifiedBytes is %d, less than MaxBodyBytes (%d): the largest body could not be read", l.MaxUnverifiedBytes, l.MaxBodyBytes)
	}
	s.unverified = newBudget(l.MaxUnverifiedBytes)
	return nil
}
