package memory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/redact"
	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
)

// Settings are those of a consumer.Config, checked and completed, that concern more than the
// request.
type Settings struct {
	Receiver, Source              string
	Destinations                  []string // all are this receiver's; nil: it has one, whose name is not known
	Tolerance, SenderNotAfter     time.Duration
	HandlerTimeout, CommitTimeout time.Duration
	Isolation                     sql.IsolationLevel
	Redact                        func(text string) string // may be nil
	Log                           *slog.Logger             // may be nil
}

// Logger returns Config.Logger, or the default one of this moment.
func (s *Settings) Logger() *slog.Logger {
	if s.Log != nil {
		return s.Log
	}
	return slog.Default()
}

// LogOutcome logs what became of a request or an attempt for an event, and why.
func (s *Settings) LogOutcome(ctx context.Context, level slog.Level, what, key, eventType string, why error, attrs ...slog.Attr) {
	logger := s.Logger()
	if !logger.Enabled(ctx, level) {
		return // most requests
	}
	attrs = append(attrs, slog.String("receiver", s.Receiver), slog.String("source", s.Source),
		slog.String("key", key), slog.String("event_type", eventType))
	if why != nil {
		attrs = append(attrs, slog.String("error", s.Redacted(why)))
	}
	if panicked, ok := errors.AsType[*verdict.Panic](why); ok {
		attrs = append(attrs, slog.String("stack", string(panicked.Stack)))
	}
	logger.LogAttrs(ctx, level, what, attrs...)
}

// Elsewhere reports whether an event that is known from one of its sender's destinations now comes
// from another receiver's. Empty names say nothing.
func (s *Settings) Elsewhere(event *headers.Event, known string) bool {
	now := event.Destination
	return known != "" && now != "" && known != now && !slices.Contains(s.Destinations, known)
}

// TxOptions are those of a handler's transaction.
func (s *Settings) TxOptions() pgx.TxOptions {
	if s.Isolation == sql.LevelDefault {
		return pgx.TxOptions{}
	}
	return pgx.TxOptions{IsoLevel: pgx.TxIsoLevel(strings.ToLower(s.Isolation.String()))}
}

// Redacted returns the text of a handler's error as it may be stored, logged and answered. Neither
// the error nor Config.Redact is this module's code: one that panics must not take the event's
// outcome with it.
func (s *Settings) Redacted(err error) (text string) {
	defer func() {
		if recover() != nil {
			text = "the error has no text: reading it, or Config.Redact, panicked"
		}
	}()
	text = err.Error()
	if s.Redact != nil {
		text = s.Redact(text)
	}
	return redact.Text(text)
}

// Loggable returns err with a text that may be logged.
func (s *Settings) Loggable(err error) error {
	return &loggableError{text: s.Redacted(err), err: err}
}

type loggableError struct {
	text string
	err  error
}

func (e *loggableError) Error() string { return e.text }
func (e *loggableError) Unwrap() error { return e.err }

// OrDefault fills in a field of a configuration that is zero. It fails, and names the field, when
// the value is negative.
func OrDefault[T int | int64 | time.Duration](field string, value *T, byDefault T) error {
	if *value < 0 {
		return fmt.Errorf("%s is negative: %v", field, *value)
	}
	if *value == 0 {
		*value = byDefault
	}
	return nil
}
