package consumer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// ReconcileConfig says what [Reconcile] answers for. Config is required.
type ReconcileConfig struct {
	// Config is that of the receiver whose events are compared. Receiver, Source, Secrets,
	// Destinations, Verify.Tolerance, Logger and the Limits of a body count, except
	// Limits.MaxBodyBytes, which is 1 MiB here. Secrets are required, even where the receiver
	// itself trusts its network.
	Config Config

	// Effects is a query whose first column has the idempotency key of each effect, a row for each:
	// "SELECT event_key FROM shipments". Keys with more than one row are reported as effects that
	// happened twice, and events that were processed and have none as lost effects, so it must have
	// the effects of every type of event that the receiver processes (UNION ALL). Of a table with
	// the effects of several sources it must select those of Config.Source: two sources may use one
	// key. It runs with the rights of the pool, in a transaction that only reads, and should name a
	// table whose keys have an index. Never build it from what a sender wrote. Empty: effects are
	// not counted.
	Effects string
}

// Reconcile returns an http.Handler that tells the sender's operator which events this receiver
// has, so that "outbox-relay reconcile" can compare them with what was sent. Mount it beside the
// receiver, at its own path:
//
//	compare, err := consumer.Reconcile(pool, consumer.ReconcileConfig{Config: cfg})
//	mux.Handle("POST /webhooks/finance/reconcile", compare)
//
// It answers for the events of one receiver from one source: digests of ranges of idempotency
// keys, and keys with their states and times. It never reads a payload and never writes. Reconcile
// fails when pool is nil or cfg cannot work.
//
// A question must carry a relay's signature (x1) by a secret that is derived from one of
// Config.Secrets, so that neither a captured delivery nor a captured question can be sent to the
// other's handler. A question is answered once in each process, and refused after
// Verify.Tolerance. One question is answered at a time; a second one gets 503. An answer has at
// most 1,000 keys or 8,192 digests. It takes about 5 seconds of reading, or as long as Effects
// takes, five minutes at most, so a WriteTimeout of the http.Server must allow for that.
func Reconcile(pool *pgxpool.Pool, cfg ReconcileConfig) (http.Handler, error) {
	cfg.Config.Limits.MaxBodyBytes, cfg.Config.Limits.MaxUnverifiedBytes = 0, 0
	s, err := cfg.Config.complete()
	switch {
	case err != nil:
		return nil, err
	case pool == nil:
		return nil, errors.New("consumer: Reconcile needs a pool")
	case len(s.secrets) == 0:
		return nil, errors.New("consumer: Reconcile needs Config.Secrets: anyone could ask which events there are")
	}
	for i, secret := range s.secrets {
		s.secrets[i] = secret.For(webhook.ReconcilePurpose)
	}
	read := func(ctx context.Context, f func(pgx.Tx) error) error {
		return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly}, f)
	}
	return &reconciler{settings: s, receiver: &reconcile.Receiver{
		Receiver: s.Receiver, Source: s.Source, Effects: cfg.Effects, Read: read, ReadEffects: read,
	}, asked: map[string]time.Time{}}, nil
}

// A reconciler answers the questions of a reconciliation.
type reconciler struct {
	*settings
	receiver *reconcile.Receiver
	busy     sync.Mutex // held while a question is answered

	mu    sync.Mutex
	asked map[string]time.Time // the keys of questions, and until when their timestamps are accepted
}

// maxAsked bounds the memory of questions. A run over ten million events asks some fifty.
const maxAsked = 10_000

func (rc *reconciler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	found, p := rc.answer(w, r)
	if p != nil {
		level := slog.LevelInfo
		if p.cause != nil {
			level = slog.LevelError
		}
		rc.shared.Logger().Log(r.Context(), level, "consumer: a question of a reconciliation was refused", "receiver", rc.Receiver, "source", rc.Source, "error", p)
		p.answer().send(w)
		return
	}
	(&answer{status: http.StatusOK, header: http.Header{"Content-Type": {"application/json"}, "Cache-Control": {"no-store"}}, body: found}).send(w)
}

func (rc *reconciler) answer(w http.ResponseWriter, r *http.Request) (body []byte, refusal *problem) {
	question, p := rc.question(w, r)
	if p != nil {
		return nil, p
	}
	if !rc.busy.TryLock() {
		return nil, receiverBusy()
	}
	defer rc.busy.Unlock()
	found, err := rc.receiver.Answer(r.Context(), question)
	switch {
	case errors.Is(err, reconcile.ErrRequest):
		return nil, newProblem(http.StatusBadRequest, "question-invalid", "The question is malformed", err.Error()+".")
	case err == nil:
		body, err = json.Marshal(found)
	}
	if err != nil {
		p := unavailable()
		p.cause = err
		return nil, p
	}
	return body, nil
}

// question reads and verifies a request without using the database.
func (rc *reconciler) question(w http.ResponseWriter, r *http.Request) (q reconcile.Request, refusal *problem) {
	arrived := time.Now()
	if r.Method != http.MethodPost {
		return q, newProblem(http.StatusMethodNotAllowed, "method-not-allowed", "Questions are sent by POST", "outbox-relay reconcile sends them.")
	}
	if err := webhook.Precheck(r.Header, arrived, rc.Verify.Tolerance); err != nil {
		leaveUnread(w, r)
		return q, rc.unproven(err)
	}
	body, room, p := rc.readBody(w, r)
	defer rc.unverified.give(room)
	if p != nil {
		return q, p
	}
	verified, err := webhook.Verify(r.Header, body, arrived, rc.Verify.Tolerance, rc.secrets...)
	key, destination := r.Header.Get(webhook.IdempotencyKey), r.Header.Get(webhook.Reconcile)
	switch {
	case err != nil:
		return q, rc.unproven(err)
	case verified != webhook.VerifiedX1 || !headers.Printable(key):
		return q, signatureInvalid("Only the signature over all headers (x1) proves a question.")
	case len(rc.Destinations) > 0 && !slices.Contains(rc.Destinations, destination):
		return q, newProblem(http.StatusMisdirectedRequest, "wrong-destination", "The question is for another destination",
			fmt.Sprintf("It is signed for the destination %q, which is not among this receiver's (Config.Destinations).", destination))
	}
	if p := rc.remember(key, arrived); p != nil {
		return q, p
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&q); err != nil {
		return q, newProblem(http.StatusBadRequest, "question-invalid", "The question is malformed", "It is not the JSON of a question that this version knows.")
	}
	return q, nil
}

// remember refuses a question that was asked before. Its timestamp may lie ahead by the tolerance,
// and is accepted for as long again.
func (rc *reconciler) remember(key string, now time.Time) *problem {
	rc.mu.Lock()
	defer rc.mu.Unlock()
	if len(rc.asked) >= maxAsked {
		for key, until := range rc.asked {
			if now.After(until) {
				delete(rc.asked, key)
			}
		}
	}
	until, known := rc.asked[key]
	switch {
	case known && now.Before(until):
		return newProblem(http.StatusConflict, "question-repeated", "The question was asked before", "Each question has its own key, and is answered once.")
	case len(rc.asked) >= maxAsked:
		return receiverBusy()
	}
	rc.asked[key] = now.Add(2*rc.Verify.Tolerance + time.Second)
	return nil
}
