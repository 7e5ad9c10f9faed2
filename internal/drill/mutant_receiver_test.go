package drill

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// tables of the receivers below. loose admits a key twice, as a table without a primary key does.
const tables = `
CREATE TABLE memory (receiver text, key text, hash bytea, PRIMARY KEY (receiver, key));
CREATE TABLE loose (receiver text, key text, hash bytea);
CREATE TABLE effect (key text);`

// A receiver does everything right, unless one of its parts is replaced.
type receiver struct {
	name    string // of its rows in memory
	pool    *pgxpool.Pool
	secrets []webhook.Secret
	ended   context.Context // with the test
	working sync.WaitGroup  // on what outlives a request

	headerTime, bodyTime time.Duration

	before    func(w http.ResponseWriter, r *http.Request) (done bool) // before it looks at a request
	read      func(w http.ResponseWriter, r *http.Request) ([]byte, error)
	verify    func(h http.Header, body []byte) error
	unproven  int
	parse     func(body []byte) int // 0: continue
	parsedYet bool                  // before it verifies
	handles   func(h http.Header) int
	key       func(r *http.Request, body []byte) string
	hash      func(body []byte) []byte
	once      func(ctx context.Context, rc *receiver, w http.ResponseWriter, r *http.Request, key string, hash []byte) (int, error)
	known     int // the answer to a duplicate
	reused    int
}

const (
	insertMemory = "INSERT INTO memory VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"
	insertEffect = "INSERT INTO effect VALUES ($1)"
	selectMemory = "SELECT hash FROM memory WHERE receiver = $1 AND key = $2"
)

const tolerance = 5 * time.Minute

func newReceiver(t testing.TB, name string, pool *pgxpool.Pool, secrets ...webhook.Secret) *receiver {
	rc := &receiver{
		name: name, pool: pool, secrets: secrets, ended: t.Context(), headerTime: stall, bodyTime: stall,
		before:   func(http.ResponseWriter, *http.Request) bool { return false },
		read:     readAtMost(1 << 20),
		unproven: http.StatusUnauthorized,
		parse: func(body []byte) int {
			if !json.Valid(body) {
				return http.StatusUnprocessableEntity
			}
			return 0
		},
		handles: func(h http.Header) int {
			if h.Get(webhook.EventType) != "drill.created" || h.Get(webhook.EventVersion) != "1" {
				return http.StatusUnprocessableEntity
			}
			return 0
		},
		key:   func(r *http.Request, _ []byte) string { return r.Header.Get(webhook.IdempotencyKey) },
		hash:  func(body []byte) []byte { sum := sha256.Sum256(body); return sum[:] },
		once:  rightly,
		known: http.StatusOK, reused: http.StatusUnprocessableEntity,
	}
	rc.verify = func(h http.Header, body []byte) error { return rc.proven(h, body, tolerance) }
	return rc
}

// proven verifies x1.
func (rc *receiver) proven(h http.Header, body []byte, within time.Duration) error {
	verified, err := webhook.Verify(h, body, time.Now(), within, rc.secrets...)
	if err == nil && verified != webhook.VerifiedX1 {
		err = webhook.ErrSignature
	}
	return err
}

func readAtMost(limit int64) func(http.ResponseWriter, *http.Request) ([]byte, error) {
	return func(w http.ResponseWriter, r *http.Request) ([]byte, error) {
		return io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	}
}

func (rc *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if rc.before(w, r) {
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(rc.bodyTime))
	body, err := rc.read(w, r)
	if err != nil {
		if _, large := errors.AsType[*http.MaxBytesError](err); large {
			w.WriteHeader(http.StatusRequestEntityTooLarge)
			return
		}
		w.WriteHeader(http.StatusRequestTimeout)
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	if status := rc.check(r, body); status != 0 {
		w.WriteHeader(status)
		return
	}
	status, err := rc.once(r.Context(), rc, w, r, rc.key(r, body), rc.hash(body))
	if err != nil {
		status = http.StatusInternalServerError
	}
	if status != 0 {
		w.WriteHeader(status)
	}
}

// check returns the status of a refusal, or 0.
func (rc *receiver) check(r *http.Request, body []byte) int {
	if rc.parsedYet {
		if status := rc.parse(body); status != 0 {
			return status
		}
	}
	if rc.verify(r.Header, body) != nil {
		return rc.unproven
	}
	key := r.Header.Get(webhook.IdempotencyKey)
	if len(r.Header[webhook.IdempotencyKey]) != 1 || len(key) > 255 || strings.ContainsFunc(key, func(c rune) bool { return c < ' ' || c > '~' }) {
		return http.StatusBadRequest
	}
	if status := rc.handles(r.Header); status != 0 {
		return status
	}
	return rc.parse(body)
}

// rightly is what is right.
func rightly(ctx context.Context, rc *receiver, _ http.ResponseWriter, _ *http.Request, key string, hash []byte) (int, error) {
	tx, err := rc.pool.Begin(ctx)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	admitted, err := tx.Exec(ctx, insertMemory, rc.name, key, hash)
	if err != nil {
		return 0, err
	}
	if admitted.RowsAffected() == 0 {
		return rc.recall(ctx, tx, key, hash)
	}
	if _, err := tx.Exec(ctx, insertEffect, effectOf(ctx, key)); err != nil {
		return 0, err
	}
	return http.StatusNoContent, tx.Commit(ctx)
}

// effectKey is where a context has the key of an effect that is remembered under another one.
type effectKey struct{}

func effectOf(ctx context.Context, key string) string {
	if other, ok := ctx.Value(effectKey{}).(string); ok {
		return other
	}
	return key
}

// A querier is a pool or a transaction.
type querier interface {
	QueryRow(ctx context.Context, query string, args ...any) pgx.Row
}

// recall returns the answer to what is known.
func (rc *receiver) recall(ctx context.Context, from querier, key string, hash []byte) (int, error) {
	var before []byte
	if err := from.QueryRow(ctx, selectMemory, rc.name, key).Scan(&before); err != nil {
		return 0, err
	}
	if !bytes.Equal(before, hash) {
		return rc.reused, nil
	}
	return rc.known, nil
}

func (rc *receiver) exec(ctx context.Context, query string, args ...any) error {
	_, err := rc.pool.Exec(ctx, query, args...)
	return err
}

// serve serves a handler until t ends, and returns its URL.
func serve(t testing.TB, handler http.Handler, headerTime time.Duration) string {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.Config.ReadHeaderTimeout = headerTime
	server.Start()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.URL
}

// secret returns a secret made of one byte.
func secret(t testing.TB, of string) webhook.Secret {
	t.Helper()
	const zero = "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
	s, err := webhook.ParseSecret(strings.Replace(zero, "AAAA", of, 1))
	pgtest.Must(t, err)
	return s
}

// countEffects probes the table of effects.
func countEffects(pool *pgxpool.Pool) Probe {
	return func(ctx context.Context, key string) (n int, err error) {
		err = pool.QueryRow(ctx, "SELECT count(*) FROM effect WHERE key = $1", key).Scan(&n)
		return n, err
	}
}

// stall is how long the receivers here wait for a request that does not continue.
const stall = 2 * time.Second

// patience ends what would hang. No assertion depends on it.
const patience = time.Minute

// config returns what tries the receiver at a URL.
func config(t testing.TB, url string, probe Probe) Config {
	t.Helper()
	return Config{
		URL: parseURL(t, url), Dialer: new(net.Dialer), Secrets: []webhook.Secret{secret(t, "new1"), secret(t, "new2")}, Retired: []webhook.Secret{secret(t, "old1")},
		Probe: probe, Destination: "default", Type: "drill.created", Version: 1, Payload: `{"drill":"{key}"}`, Timeout: patience, Tolerance: tolerance,
		Settle: patience, Patience: patience, MaxBody: 1 << 20, Rate: 200, For: time.Second, Done: func(Result) {},
	}
}

// outcomes returns the names of the checks that ended so.
func outcomes(r Report, of ...string) (names []string) {
	for _, result := range r.Checks {
		if slices.Contains(of, result.Outcome) {
			names = append(names, result.Name)
		}
	}
	return names
}
