package drill

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A mutant is a receiver with one mistake.
type mutant struct {
	name string
	// finds are the checks that must name it, says is part of what the first of them says. may are
	// others that its mistake can fail.
	finds, may []string
	says       string
	mutate     func(t *testing.T, rc *receiver)
	config     func(*Config)
}

func names(list string) []string { return strings.Fields(list) }

// loses lets a drill give up soon on effects that never come.
func loses(c *Config) { c.Settle = time.Second }

// pauseIn is how long the steps of a careless receiver are apart.
const pauseIn = 30 * time.Millisecond

// forgery is what every check of a forged event finds.
const forgery = "wrong-secret retired-secret cut-signature changed-body changed-key changed-header"

// answers lets a receiver answer a status instead of another.
func answers(instead int, of *int) { *of = instead }

var mutants = []mutant{
	// Duplicates.
	{name: "no deduplication", finds: names("duplicate at-once cut-before-answer replay key-blanks late-duplicate key-reused header-case"), may: names("changed-key under-load"), says: "2 effects", mutate: func(_ *testing.T, rc *receiver) {
		rc.once = func(ctx context.Context, rc *receiver, _ http.ResponseWriter, _ *http.Request, key string, _ []byte) (int, error) {
			return http.StatusNoContent, rc.exec(ctx, insertEffect, key)
		}
	}},
	{name: "effect and then memory, in two transactions", finds: names("cut-before-answer"), may: names("at-once under-load"), says: "2 effects", config: loses, mutate: func(_ *testing.T, rc *receiver) {
		rc.once = func(ctx context.Context, rc *receiver, _ http.ResponseWriter, _ *http.Request, key string, hash []byte) (int, error) {
			if status, err := rc.recall(ctx, rc.pool, key, hash); err == nil {
				return status, nil
			}
			if err := rc.exec(ctx, insertEffect, key); err != nil {
				return 0, err
			}
			_ = sleep.For(ctx, pauseIn)
			return http.StatusNoContent, rc.exec(ctx, insertMemory, rc.name, key, hash)
		}
	}},
	{name: "memory and then effect, in two transactions", finds: names("cut-before-answer"), may: names("after-commit at-once cut-body under-load"), says: "lost", config: loses, mutate: func(_ *testing.T, rc *receiver) {
		rc.once = func(ctx context.Context, rc *receiver, _ http.ResponseWriter, _ *http.Request, key string, hash []byte) (int, error) {
			admitted, err := rc.pool.Exec(ctx, insertMemory, rc.name, key, hash)
			if err == nil && admitted.RowsAffected() == 0 {
				return rc.recall(ctx, rc.pool, key, hash)
			}
			_ = sleep.For(ctx, pauseIn)
			return http.StatusNoContent, errors.Join(err, rc.exec(ctx, insertEffect, key))
		}
	}},
	{name: "a look for the key, and then an insert that nothing forbids", finds: names("at-once"), may: names("key-reused under-load cut-before-answer cut-body"), says: "effects instead of 1", mutate: func(_ *testing.T, rc *receiver) {
		rc.once = func(ctx context.Context, rc *receiver, _ http.ResponseWriter, _ *http.Request, key string, hash []byte) (int, error) {
			if rc.seen(ctx, key) {
				return rc.known, nil
			}
			_ = sleep.For(ctx, pauseIn)
			return http.StatusNoContent, pgx.BeginFunc(ctx, rc.pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, insertEffect, key)
				if err == nil {
					_, err = tx.Exec(ctx, "INSERT INTO loose VALUES ($1, $2, $3)", rc.name, key, hash)
				}
				return err
			})
		}
		rc.reused = rc.known
	}},
	{name: "keys in the memory of the process, the last 50", finds: names("late-duplicate"), may: names("key-reused"), says: "2 effects", mutate: func(_ *testing.T, rc *receiver) {
		var mu sync.Mutex
		var last []string
		rc.once = func(ctx context.Context, rc *receiver, _ http.ResponseWriter, _ *http.Request, key string, _ []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			for _, known := range last {
				if known == key {
					return rc.known, nil
				}
			}
			last = append(last, key)[max(len(last)-49, 0):]
			return http.StatusNoContent, rc.exec(context.WithoutCancel(ctx), insertEffect, key)
		}
	}, config: func(c *Config) { c.Only = names("under-load late-duplicate") }},
	{name: "500 to a duplicate", finds: names("duplicate replay late-duplicate"), may: names("at-once cut-before-answer cut-body key-blanks header-case under-load key-reused"), says: "answered 500", mutate: func(_ *testing.T, rc *receiver) { answers(500, &rc.known) }},
	{name: "409 to a duplicate", finds: names("duplicate replay late-duplicate"), may: names("at-once cut-before-answer cut-body key-blanks header-case under-load key-reused"), says: "answered 409", mutate: func(_ *testing.T, rc *receiver) { answers(409, &rc.known) }},
	{name: "422 to a duplicate", finds: names("duplicate replay late-duplicate"), may: names("at-once cut-before-answer cut-body key-blanks header-case under-load"), says: "took effect, for failed", mutate: func(_ *testing.T, rc *receiver) { answers(422, &rc.known) }},
	{name: "500 to who comes second at once", finds: names("at-once"), may: names("under-load cut-before-answer cut-body"), says: "answered 500", mutate: func(_ *testing.T, rc *receiver) {
		rc.once = func(ctx context.Context, rc *receiver, _ http.ResponseWriter, _ *http.Request, key string, hash []byte) (int, error) {
			if status, err := rc.recall(ctx, rc.pool, key, hash); err == nil {
				return status, nil
			}
			_ = sleep.For(ctx, pauseIn)
			return http.StatusNoContent, pgx.BeginFunc(ctx, rc.pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "INSERT INTO memory VALUES ($1, $2, $3)", rc.name, key, hash)
				if err == nil {
					_, err = tx.Exec(ctx, insertEffect, key)
				}
				return err
			})
		}
	}},
	{name: "a replay goes past the memory", finds: names("replay"), says: "2 effects", mutate: func(_ *testing.T, rc *receiver) {
		right := rc.once
		rc.once = func(ctx context.Context, rc *receiver, w http.ResponseWriter, r *http.Request, key string, hash []byte) (int, error) {
			if r.Header.Get(webhook.Replay) == "true" {
				return http.StatusNoContent, rc.exec(ctx, insertEffect, key)
			}
			return right(ctx, rc, w, r, key, hash)
		}
	}},
	{name: "2xx to a key with another body", finds: names("key-reused"), says: "never learns", mutate: func(_ *testing.T, rc *receiver) { answers(200, &rc.reused) }},
	{name: "the hash of the body as the key", finds: names("same-content key-reused"), says: "1 effects of 2", config: loses, mutate: func(_ *testing.T, rc *receiver) {
		rc.keyed(func(_ *http.Request, body []byte) string { return base64.StdEncoding.EncodeToString(rc.hash(body)) })
	}},
	{name: "the event id as the key", finds: names("same-event-id"), config: loses, mutate: func(_ *testing.T, rc *receiver) {
		rc.keyed(func(r *http.Request, _ []byte) string { return r.Header.Get(webhook.EventID) })
	}},
	{name: "the delivery id as the key", finds: names("duplicate at-once cut-before-answer replay late-duplicate key-blanks header-case key-reused"), may: names("under-load"), says: "2 effects", mutate: func(_ *testing.T, rc *receiver) {
		rc.keyed(func(r *http.Request, _ []byte) string { return r.Header.Get(webhook.DeliveryID) })
	}},
	{name: "a key without regard to case", finds: names("key-case"), config: loses, mutate: func(_ *testing.T, rc *receiver) {
		rc.keyed(func(r *http.Request, _ []byte) string { return strings.ToLower(r.Header.Get(webhook.IdempotencyKey)) })
	}},
	{name: "the first 64 characters of a key", finds: names("key-long"), config: loses, mutate: func(_ *testing.T, rc *receiver) {
		rc.keyed(func(r *http.Request, _ []byte) string {
			return r.Header.Get(webhook.IdempotencyKey)[:min(64, len(r.Header.Get(webhook.IdempotencyKey)))]
		})
	}},
	{name: "a key that is decoded like a URL", finds: names("key-odd"), config: loses, mutate: func(_ *testing.T, rc *receiver) {
		rc.keyed(func(r *http.Request, _ []byte) string {
			key, _ := url.QueryUnescape(r.Header.Get(webhook.IdempotencyKey))
			return key
		})
	}},
	{name: "the key of any bytes goes to the database", finds: names("key-utf8"), says: "answered 500", mutate: func(_ *testing.T, rc *receiver) {
		right := rc.verify
		rc.verify = func(h http.Header, body []byte) error {
			err := right(h, body)
			if err == nil && strings.Contains(h.Get(webhook.IdempotencyKey), "\xff") {
				h[webhook.IdempotencyKey] = []string{"key"} // past the check of a right receiver
				h["Bad"] = []string{"\xff"}
			}
			return err
		}
		rc.key = func(r *http.Request, _ []byte) string {
			return r.Header.Get(webhook.IdempotencyKey) + r.Header.Get("Bad")
		}
	}},

	// The moment of the answer.
	{name: "commit after the answer", finds: names("after-commit"), may: names("cut-before-answer duplicate at-once replay key-blanks header-case under-load late-duplicate cut-body key-reused changed-key not-json"), says: "not there when the answer was", mutate: func(_ *testing.T, rc *receiver) {
		rc.once = func(ctx context.Context, rc *receiver, w http.ResponseWriter, _ *http.Request, key string, hash []byte) (int, error) {
			tx, err := rc.pool.Begin(ctx)
			if err != nil {
				return 0, err
			}
			defer tx.Rollback(context.WithoutCancel(ctx))
			admitted, err := tx.Exec(ctx, insertMemory, rc.name, key, hash)
			if err != nil {
				return 0, err
			} else if admitted.RowsAffected() == 0 {
				return rc.recall(ctx, tx, key, hash)
			}
			if _, err := tx.Exec(ctx, insertEffect, key); err != nil {
				return 0, err
			}
			w.WriteHeader(http.StatusNoContent)
			_ = http.NewResponseController(w).Flush()
			_ = sleep.For(rc.ended, pauseIn)
			_ = tx.Commit(context.WithoutCancel(ctx))
			return 0, nil
		}
	}},
	{name: "work after the answer", finds: names("after-commit"), may: names("duplicate at-once cut-before-answer under-load late-duplicate replay"), says: "not there when the answer was", mutate: func(_ *testing.T, rc *receiver) {
		right := rc.once
		rc.once = func(ctx context.Context, rc *receiver, w http.ResponseWriter, r *http.Request, key string, hash []byte) (int, error) {
			rc.working.Go(func() {
				_ = sleep.For(rc.ended, pauseIn)
				_, _ = right(context.WithoutCancel(ctx), rc, w, r, key, hash)
			})
			return http.StatusOK, nil
		}
		rc.reused = http.StatusOK
	}, config: func(c *Config) { c.Skip = names("key-reused") }},
	{name: "an effect that is rolled back, and 2xx", finds: names("valid"), says: "lost", config: loses, mutate: func(_ *testing.T, rc *receiver) {
		rc.once = func(ctx context.Context, rc *receiver, _ http.ResponseWriter, _ *http.Request, key string, _ []byte) (int, error) {
			tx, err := rc.pool.Begin(ctx)
			if err != nil {
				return 0, err
			}
			_, err = tx.Exec(ctx, insertEffect, key)
			return http.StatusNoContent, errors.Join(err, tx.Rollback(ctx))
		}
	}},
	{name: "2xx to a failure", finds: names("not-json"), says: "lost", config: loses, mutate: func(_ *testing.T, rc *receiver) {
		rc.parse = func(body []byte) int {
			if !json.Valid(body) {
				return http.StatusOK
			}
			return 0
		}
	}},
	{name: "an answer after the timeout", finds: names("valid"), says: "answered after", mutate: func(_ *testing.T, rc *receiver) {
		rc.before = func(http.ResponseWriter, *http.Request) bool {
			_ = sleep.For(rc.ended, 500*time.Millisecond)
			return false
		}
	}, config: func(c *Config) { c.Timeout = 200 * time.Millisecond }},

	// Signatures.
	{name: "no verification", finds: names("unsigned old-timestamp future-timestamp odd-timestamp " + forgery), says: "took effect", mutate: func(_ *testing.T, rc *receiver) {
		rc.verify = func(http.Header, []byte) error { return nil }
	}, config: func(c *Config) { c.Skip = names("refusal-status parsed-first") }},
	{name: "no verification without a signature", finds: names("unsigned"), says: "took effect", mutate: func(_ *testing.T, rc *receiver) {
		right := rc.verify
		rc.verify = func(h http.Header, body []byte) error {
			if h.Get(webhook.Signature) == "" {
				return nil
			}
			return right(h, body)
		}
	}},
	{name: "verification after the effect", finds: names("unsigned wrong-secret retired-secret cut-signature changed-body old-timestamp future-timestamp odd-timestamp not-json"), may: names("changed-key unknown-type too-large slow-body"), says: "took effect", mutate: func(_ *testing.T, rc *receiver) {
		check := rc.once
		rc.before = func(w http.ResponseWriter, r *http.Request) bool {
			body, err := rc.read(w, r)
			if err != nil {
				return false
			}
			r.Body = io.NopCloser(bytes.NewReader(body))
			key := r.Header.Get(webhook.IdempotencyKey)
			if !strings.ContainsFunc(key, func(c rune) bool { return c > '~' }) {
				_, _ = check(r.Context(), rc, w, r, key, rc.hash(body))
			}
			return false
		}
	}},
	{name: "v1 alone, and the headers believed", finds: names("changed-key changed-header"), says: "2 effects", mutate: func(_ *testing.T, rc *receiver) {
		rc.verify = func(h http.Header, body []byte) error {
			h[webhook.IdempotencyKey] = h[webhook.IdempotencyKey][:1]
			_, err := webhook.Verify(h, body, time.Now(), tolerance, rc.secrets...)
			return err
		}
	}},
	{name: "the first signature alone", finds: names("other-signatures"), says: "answered 401", mutate: func(_ *testing.T, rc *receiver) {
		rc.lookingAt(func(signatures []string) []string { return signatures[:min(2, len(signatures))] })
	}},
	{name: "the last signature alone", finds: names("other-signatures"), says: "answered 401", mutate: func(_ *testing.T, rc *receiver) {
		rc.lookingAt(func(signatures []string) []string { return signatures[max(len(signatures)-1, 0):] })
	}},
	{name: "the old secret alone", finds: names("each-secret"), says: "secret 2 alone", mutate: func(_ *testing.T, rc *receiver) { rc.secrets = rc.secrets[:1] }},
	{name: "a secret that was taken back", finds: names("retired-secret"), says: "took effect", mutate: func(t *testing.T, rc *receiver) { rc.secrets = append(rc.secrets, secret(t, "old1")) }},
	{name: "as much of a signature as there is", finds: names("cut-signature"), says: "took effect", mutate: func(_ *testing.T, rc *receiver) {
		right := rc.verify
		rc.verify = func(h http.Header, body []byte) error {
			signed := http.Header{webhook.IdempotencyKey: h[webhook.IdempotencyKey]}
			for name, values := range h {
				if webhook.Covered(name) {
					signed[name] = values
				}
			}
			seconds, _ := strconv.ParseInt(h.Get(webhook.Timestamp), 10, 64)
			for _, s := range rc.secrets {
				webhook.Sign(signed, body, time.Unix(seconds, 0), s)
				for _, want := range strings.Fields(signed.Get(webhook.Signature)) {
					for _, got := range strings.Fields(h.Get(webhook.Signature)) {
						if strings.HasPrefix(got, "x1,") && strings.HasPrefix(want, got) && time.Since(time.Unix(seconds, 0)).Abs() < tolerance {
							return nil
						}
					}
				}
			}
			return right(h, body)
		}
	}},
	{name: "JSON that was parsed and written again", finds: names("exact-bytes changed-body"), may: names("large-body too-large key-reused key-odd"), mutate: func(_ *testing.T, rc *receiver) {
		right := rc.verify
		rc.verify = func(h http.Header, body []byte) error {
			var again bytes.Buffer
			if json.Compact(&again, body) != nil {
				return right(h, body)
			}
			return right(h, again.Bytes())
		}
	}},
	{name: "the parser before the verification", finds: names("parsed-first"), says: "strangers reach the parser", mutate: func(_ *testing.T, rc *receiver) { rc.parsedYet = true }},
	{name: "no tolerance for the future", finds: names("within-tolerance"), says: "2m30s ahead", mutate: func(_ *testing.T, rc *receiver) {
		rc.within(func(by time.Duration) bool { return by <= 30*time.Second && by > -tolerance })
	}},
	{name: "ten seconds of tolerance", finds: names("within-tolerance"), says: "2m30s ago", mutate: func(_ *testing.T, rc *receiver) {
		rc.within(func(by time.Duration) bool { return by.Abs() < 10*time.Second })
	}, config: func(c *Config) { c.Only = names("within-tolerance") }}, // a slow machine needs more than ten seconds for others
	{name: "any timestamp", finds: names("old-timestamp future-timestamp odd-timestamp"), says: "took effect", mutate: func(_ *testing.T, rc *receiver) {
		rc.within(func(time.Duration) bool { return true })
	}},
	{name: "timestamps of the future", finds: names("future-timestamp odd-timestamp"), says: "took effect", mutate: func(_ *testing.T, rc *receiver) {
		rc.within(func(by time.Duration) bool { return by > -tolerance })
	}},
	{name: "an hour of tolerance", finds: names("old-timestamp future-timestamp"), says: "took effect", mutate: func(_ *testing.T, rc *receiver) {
		rc.within(func(by time.Duration) bool { return by.Abs() < time.Hour })
	}},
	{name: "timestamps that are no number of digits", finds: names("odd-timestamp"), says: "with the timestamp -1", mutate: func(_ *testing.T, rc *receiver) {
		right := rc.verify
		rc.verify = func(h http.Header, body []byte) error {
			if _, err := strconv.ParseUint(h.Get(webhook.Timestamp), 10, 64); err != nil {
				return rc.signed(h, body)
			}
			return right(h, body)
		}
	}},
	{name: "a list of headers that are signed", finds: names("new-header"), says: "answered 401", mutate: func(_ *testing.T, rc *receiver) {
		right := rc.verify
		rc.verify = func(h http.Header, body []byte) error {
			known := h.Clone()
			delete(known, webhook.OutboxPrefix+"Drill")
			return right(known, body)
		}
	}},
	{name: "X-Outbox headers alone", finds: names("changed-header new-header"), says: "the other headers about it", mutate: func(_ *testing.T, rc *receiver) {
		right := rc.verify
		rc.verify = func(h http.Header, body []byte) error {
			known := h.Clone()
			delete(known, "X-Event-Drill")
			return right(known, body)
		}
	}},
	{name: "400 to a wrong signature", finds: names("refusal-status"), says: "answered 400", mutate: func(_ *testing.T, rc *receiver) { answers(400, &rc.unproven) }},

	// Bodies.
	{name: "any body", finds: names("too-large"), says: "took effect", mutate: func(_ *testing.T, rc *receiver) { rc.read = readAtMost(1 << 40); rc.bodyTime = patience }, config: func(c *Config) { c.Skip = names("slow-body") }},
	{name: "bodies up to 100 KiB", finds: names("large-body"), says: "answered 413", mutate: func(_ *testing.T, rc *receiver) { rc.read = readAtMost(100 << 10) }},
	{name: "no body without Content-Length", finds: names("chunked"), says: "answered 411", mutate: func(_ *testing.T, rc *receiver) {
		rc.before = func(w http.ResponseWriter, r *http.Request) bool {
			if r.ContentLength < 0 {
				w.WriteHeader(http.StatusLengthRequired)
			}
			return r.ContentLength < 0
		}
	}},
	{name: "memory before the body has come", finds: names("cut-body"), may: names("unsigned"), says: "lost", mutate: func(_ *testing.T, rc *receiver) {
		var begun sync.Map
		rc.before = func(_ http.ResponseWriter, r *http.Request) bool {
			_, known := begun.LoadOrStore(r.Header.Get(webhook.IdempotencyKey), true)
			r.Header.Set("Known", strconv.FormatBool(known))
			return false
		}
		right := rc.once
		rc.once = func(ctx context.Context, rc *receiver, w http.ResponseWriter, r *http.Request, key string, hash []byte) (int, error) {
			if r.Header.Get("Known") == "true" && !rc.seen(ctx, key) {
				return rc.known, nil
			}
			return right(ctx, rc, w, r, key, hash)
		}
	}, config: func(c *Config) { loses(c); c.Only = names("cut-body") }}, // its other mistakes are those of who comes second
	{name: "500 to what is no JSON", finds: names("not-json"), says: "answered 500", mutate: func(_ *testing.T, rc *receiver) {
		rc.parse = func(body []byte) int {
			if !json.Valid(body) {
				return http.StatusInternalServerError
			}
			return 0
		}
	}},
	{name: "any time for a body", finds: names("slow-body"), says: "still waits for a body", mutate: func(_ *testing.T, rc *receiver) { rc.bodyTime = patience }, config: func(c *Config) { c.Patience = 2 * time.Second }},

	// Events, connections, load.
	{name: "500 to an unknown type", finds: names("unknown-type"), says: "answered 500", mutate: func(_ *testing.T, rc *receiver) { rc.unknowing(webhook.EventType, "drill.created", 500) }},
	{name: "404 to an unknown version", finds: names("unknown-version"), says: "answered 404", mutate: func(_ *testing.T, rc *receiver) { rc.unknowing(webhook.EventVersion, "1", 404) }},
	{name: "409 to what comes out of order", finds: names("reordered"), says: "waits behind it", mutate: func(_ *testing.T, rc *receiver) {
		var last sync.Map
		right := rc.once
		rc.once = func(ctx context.Context, rc *receiver, w http.ResponseWriter, r *http.Request, key string, hash []byte) (int, error) {
			order, sequence := r.Header.Get(webhook.OrderingKey), r.Header.Get(webhook.Sequence)
			if before, known := last.Swap(order, sequence); known && order != "" && before.(string) > sequence {
				return http.StatusConflict, nil
			}
			return right(ctx, rc, w, r, key, hash)
		}
	}},
	{name: "any time for headers", finds: names("half-request"), says: "second half", mutate: func(_ *testing.T, rc *receiver) { rc.headerTime = patience }, config: func(c *Config) { c.Patience = 2 * time.Second }},
	{name: "events that are dropped under load", finds: names("under-load"), may: names("at-once after-commit"), says: "lost", config: func(c *Config) { loses(c); c.Only = names("duplicate under-load still-well") }, mutate: func(_ *testing.T, rc *receiver) {
		queue, right := make(chan struct{}, 2), rc.once
		rc.once = func(ctx context.Context, rc *receiver, w http.ResponseWriter, r *http.Request, key string, hash []byte) (int, error) {
			select {
			case queue <- struct{}{}:
				defer func() { <-queue }()
				_ = sleep.For(ctx, pauseIn)
				return right(ctx, rc, w, r, key, hash)
			default:
				return http.StatusOK, nil
			}
		}
	}},
	{name: "500 under load", finds: names("under-load"), may: names("at-once"), says: "answered 500", config: func(c *Config) { c.Only = names("duplicate under-load still-well") }, mutate: func(_ *testing.T, rc *receiver) {
		slots, right := make(chan struct{}, 2), rc.once
		rc.once = func(ctx context.Context, rc *receiver, w http.ResponseWriter, r *http.Request, key string, hash []byte) (int, error) {
			select {
			case slots <- struct{}{}:
				defer func() { <-slots }()
				_ = sleep.For(ctx, pauseIn)
				return right(ctx, rc, w, r, key, hash)
			default:
				return 0, errors.New("too many")
			}
		}
	}},
	{name: "a connection that is lost with each failure", finds: names("still-well"), may: names("late-duplicate under-load reordered header-case split-request half-request unknown-version"), says: "did not answer", mutate: func(_ *testing.T, rc *receiver) {
		lost, right := make(chan struct{}, 3), rc.once // the pool, one of which is lost with each event that is no JSON
		rc.once = func(ctx context.Context, rc *receiver, w http.ResponseWriter, r *http.Request, key string, hash []byte) (int, error) {
			if len(lost) > 0 {
				_ = sleep.For(ctx, patience) // for a connection that never comes
				return http.StatusServiceUnavailable, nil
			}
			return right(ctx, rc, w, r, key, hash)
		}
		parse := rc.parse
		rc.parse = func(body []byte) int {
			status := parse(body)
			if status != 0 {
				lost <- struct{}{}
			}
			return status
		}
	}, config: func(c *Config) { c.Timeout = 3 * time.Second; c.Only = names("duplicate not-json still-well") }},
}
