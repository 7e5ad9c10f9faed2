package consumer_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/internal/message"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestFirstThenDuplicate(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		receivertest.WantFirst(t, e.Post("k1", `{"n":1}`), http.StatusCreated, `{"done":"k1"}`)
		e.WantResult(consumer.ResultProcessed)

		again := e.Post("k1", `{"n":1}`)
		receivertest.WantReplayed(t, again, http.StatusCreated, "")
		for _, name := range []string{"Content-Type", "X-Handler"} {
			if got := again.Header.Get(name); got != "" {
				t.Errorf("%s of the first answer comes again: %q", name, got)
			}
		}
		report := e.WantResult(consumer.ResultDuplicate)
		if report.Event.IdempotencyKey != "k1" || report.Status != http.StatusCreated || report.Err != nil {
			t.Errorf("report %+v", report)
		}
		e.WantRows("k1", 1, 1)
	})
}

func TestEveryStatusIsReplayed(t *testing.T) {
	cases := map[string]struct {
		handler http.HandlerFunc
		status  int
		body    string // of the first answer; a duplicate's has none
	}{
		"nothing written":      {func(http.ResponseWriter, *http.Request) {}, 200, ""},
		"no content":           {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, 204, ""},
		"body of no content":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204); io.WriteString(w, "x") }, 204, ""},
		"second header":        {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(202); w.WriteHeader(500) }, 202, ""},
		"informational":        {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(103); w.WriteHeader(201) }, 201, ""},
		"status of the margin": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(299) }, 299, ""},
		"bytes, not text":      {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "\x00\xff\xfe") }, 200, "\x00\xff\xfe"},
		"wrong length declared": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			io.WriteString(w, "short")
		}, 200, "short"},
	}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				e := receivertest.NewEnv(t, f, consumer.Config{}, func(*receivertest.Env) http.HandlerFunc { return c.handler })
				receivertest.WantFirst(t, e.Post("k", "{}"), c.status, c.body)
				receivertest.WantReplayed(t, e.Post("k", "{}"), c.status, "")
			})
		}
	})
}

// The first answer has the handler's headers as they were when it wrote the status.
func TestHeadersOfTheHandlerAreSent(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, func(*receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Set-Cookie", "session=secret")
				w.Header().Add("Vary", "Accept")
				w.Header().Add("Vary", "Origin")
				w.WriteHeader(http.StatusOK)
				w.Header().Set("X-Late", "after WriteHeader")
			}
		})
		if h := e.Post("k", "{}").Header; h.Get("Set-Cookie") == "" || len(h.Values("Vary")) != 2 || h.Get("X-Late") != "" {
			t.Errorf("answered %v", h)
		}
	})
}

// The status that admission anticipates is not written again.
func TestNoContentIsWrittenOnce(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
				w.Header().Set("X-Kind", "express")
				w.WriteHeader(http.StatusNoContent)
			}
		})
		receivertest.WantFirst(t, e.Post("k", "{}"), 204, "")
		receivertest.WantReplayed(t, e.Post("k", "{}"), 204, "")
		e.WantRows("k", 1, 1)
		// What is never written twice has been written by one statement of its transaction; an
		// UPDATE is a later one.
		testkit.Equal(t, "rows were written once", e.Count("SELECT count(*) FROM processed_events WHERE cmin = '0'::cid"), 1)
	})
}

func TestReusedKeyIsRefused(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		e.Post("k", `{"amount":1}`)
		e.WantResult(consumer.ResultProcessed)
		for _, body := range []string{`{"amount":2}`, ``, `{"amount":1} `} {
			receivertest.WantProblem(t, e.Post("k", body), 422, "key-reused")
			e.WantResult(consumer.ResultKeyReused)
		}
		receivertest.WantReplayed(t, e.Post("k", `{"amount":1}`), http.StatusCreated, "")
		e.WantRows("k", 1, 1)
	})
}

func TestOtherThan2xxRollsBackAndPasses(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				status, err := strconv.Atoi(r.Header.Get("Test-Status"))
				mustNot(e, err)
				receivertest.Effect(e)(&statusOverride{w, status}, r)
			}
		})
		for _, code := range []int{300, 302, 304, 307, 400, 404, 409, 410, 422, 429, 500, 503, 599, 999} {
			key := "k" + strconv.Itoa(code)
			got := e.Do(e.NewRequest(key, "{}", receivertest.With("Test-Status", strconv.Itoa(code))))
			if got.Status != code || got.Header.Get("X-Handler") != "ran" {
				t.Errorf("status %d %v, want %d", got.Status, got.Header, code)
			}
			if body := `{"done":"` + key + `"}`; code != 304 && got.Body != body {
				t.Errorf("%d: body %q, want %q", code, got.Body, body)
			}
			e.WantResult(consumer.ResultFailed)
			e.WantRows(key, 0, 0)

			// The retry runs it: nothing remembers the failure.
			receivertest.WantFirst(t, e.Do(e.NewRequest(key, "{}", receivertest.With("Test-Status", "200"))), 200, `{"done":"`+key+`"}`)
			e.WantRows(key, 1, 1)
			e.WantResult(consumer.ResultProcessed)
		}
	})
}

// statusOverride answers with another status than the handler it wraps.
type statusOverride struct {
	http.ResponseWriter
	status int
}

func (w *statusOverride) WriteHeader(int) { w.ResponseWriter.WriteHeader(w.status) }

func TestDatabaseDownIs503(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		// Without a connection nothing runs: failing open would process events twice.
		e.MustExec("ALTER TABLE processed_events RENAME TO elsewhere")
		receivertest.WantProblem(t, e.Post("k", "{}"), 503, "database-unavailable")
		if report := e.WantResult(consumer.ResultUnavailable); report.Err == nil {
			t.Error("the report has no error")
		}
		// Without the migrations the answer says so.
		testkit.Contains(t, "logged", e.Logged.String(), "level=ERROR", "outbox-relay migrate up --set inbox")
		e.MustExec("ALTER TABLE elsewhere RENAME TO processed_events")
		receivertest.WantFirst(t, e.Post("k", "{}"), http.StatusCreated, `{"done":"k"}`)

		receivertest.WantProblem(t, unreachable(t, f, consumer.Config{}).Post("k2", "{}"), 503, "database-unavailable")
	})
}

// Connections that a restart broke must not make the receiver give up: it refuses while the
// database is away, and works as soon as it is back.
func TestDatabaseStopsAndComesBack(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"synchronous_commit": "on"}}) // or the crash loses commits
		dsn := server.DSN("postgres")
		pgtest.Migrate(t, dsn, migrations.Inbox)
		e := receivertest.NewEnvAt(t, f, dsn, consumer.Config{}, receivertest.Effect)
		e.MustExec(receivertest.Schema)
		receivertest.WantFirst(t, e.Post("before", "{}"), 201, `{"done":"before"}`)
		pgtest.Must(t, server.StopImmediate(t.Context()))
		for range 2 { // once on a broken connection, once on none
			receivertest.WantProblem(t, e.Post("after", "{}"), 503, "database-unavailable")
		}
		pgtest.Must(t, server.StartAgain(t.Context()))
		receivertest.WantReplayed(t, e.Post("before", "{}"), 201, "")
		receivertest.WantFirst(t, e.Post("after", "{}"), 201, `{"done":"after"}`)
	})
}

// Behind a connection pooler pgx runs in another mode, with other rules for parameter types.
func TestEveryQueryExecMode(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
			t.Run(mode, func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "default_query_exec_mode", mode)
				e := receivertest.NewEnvAt(t, f, dsn, consumer.Config{}, receivertest.Effect)
				for statement := range strings.SplitSeq(receivertest.Schema, ";") {
					e.MustExec(statement)
				}
				receivertest.WantFirst(t, e.Post("k", "{}"), 201, `{"done":"k"}`)
				receivertest.WantReplayed(t, e.Post("k", "{}"), 201, "")
				receivertest.WantProblem(t, e.Post("k", "[]"), 422, "key-reused")
			})
		}
	})
}

// unreachable is a receiver whose database refuses connections. What it answers other than 503, it
// answers without one.
func unreachable(t *testing.T, f receivertest.Flavour, cfg consumer.Config) *receivertest.Env {
	e := receivertest.NewEnvAt(t, f, "postgres://stranger@127.0.0.1:1/none?sslmode=disable", cfg, func(*receivertest.Env) http.HandlerFunc {
		return func(http.ResponseWriter, *http.Request) { t.Error("the handler ran without a database") }
	})
	return e
}

func TestHandlerSeesTheVerifiedEventAndTheWholeBody(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		seen := make(chan consumer.Event, 1)
		e := receivertest.NewEnv(t, f, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				seen <- consumer.EventFrom(r.Context())
				body, err := io.ReadAll(r.Body)
				if err != nil || int64(len(body)) != r.ContentLength {
					t.Errorf("%d bytes, Content-Length %d: %v", len(body), r.ContentLength, err)
				}
				w.Write(body)
			}
		})
		body := `{"big":"` + strings.Repeat("x", 300<<10) + `"}`
		got := e.Do(e.NewRequest("invoice/1.created v2", body, func(h http.Header) {
			h.Set(webhook.EventVersion, "3")
			h.Set(webhook.EventID, "9007199254740993")
			h.Set(webhook.CreatedAt, "2026-01-02T03:04:05.678901Z")
			h.Set(webhook.RelatedReference, "INV-1")
			h.Set(webhook.OrderingKey, "customer 7")
			h.Set(webhook.Sequence, "12")
			h.Set(webhook.Attempt, "4")
			h.Set(webhook.DeliveryID, "d-1")
			h.Set(webhook.Destination, "shop")
			h.Set(webhook.NotAfter, "2126-02-02T03:04:05Z")
			h.Set(webhook.Replay, "true")
			h.Set(webhook.TraceParent, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
			h.Set(webhook.TraceState, "vendor=1")
		}))
		receivertest.WantFirst(t, got, 200, body)
		event := <-seen
		created, until := event.CreatedAt, event.NotAfter
		event.CreatedAt, event.NotAfter = event.CreatedAt.UTC(), event.NotAfter.UTC()
		want := consumer.Event{
			Receiver: "test", Source: "outbox", IdempotencyKey: "invoice/1.created v2", Type: "invoice.created", Version: 3, ID: 9007199254740993,
			CreatedAt: created, RelatedReference: "INV-1", OrderingKey: "customer 7", Sequence: 12, Attempt: 4,
			DeliveryID: "d-1", Destination: "shop", NotAfter: until, Replay: true,
			TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", TraceState: "vendor=1",
			Payload: []byte(body),
		}
		if !reflect.DeepEqual(event, want) || created.UnixMicro() != 1767323045678901 || until.Unix() != 4925675045 {
			t.Errorf("event %+v\nwant  %+v", event, want)
		}
		if n := e.Count(`SELECT count(*) FROM processed_events WHERE source = 'outbox' AND event_type = 'invoice.created'
			AND event_version = 3 AND related_reference = 'INV-1' AND processing_state = 'succeeded' AND processed_at >= received_at`); n != 1 {
			t.Error("the inbox row does not describe the event")
		}
	})
}

func TestSourcesKeepTheirKeysApart(t *testing.T) {
	var all strings.Builder
	for c := byte(' ') + 1; c < '~'; c++ {
		all.WriteByte(c)
	}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		finance := receivertest.NewEnv(t, f, consumer.Config{Receiver: "test", Source: "finance"}, answer204)
		stock := receivertest.NewEnvAt(t, f, finance.DSN, consumer.Config{Receiver: "test", Source: "finance:stock"}, answer204)
		keys := []string{all.String(), strings.Repeat("k", 255), strings.Repeat("k", 254), "a b", "a  b", "A B", "%00", `\n`, "*", "'; --", "null", "0", "00", "a:b", "stock:a"}
		for _, send := range []func(*receivertest.Env, string){
			func(e *receivertest.Env, key string) { receivertest.WantFirst(t, e.Post(key, "{}"), 204, "") },
			func(e *receivertest.Env, key string) { receivertest.WantReplayed(t, e.Post(key, "{}"), 204, "") },
		} {
			for _, key := range keys {
				send(finance, key)
				send(stock, key)
			}
		}
	})
}

func answer204(*receivertest.Env) http.HandlerFunc { return answers["204"] }

func TestMistakesOfConstructors(t *testing.T) {
	t.Parallel()
	good := consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}}
	with := func(change func(*consumer.Config)) consumer.Config {
		c := good
		change(&c)
		return c
	}
	pool := pgtest.Pool(t, "postgres://stranger@127.0.0.1:1/none")
	handle := func(context.Context, pgx.Tx, consumer.Event) error { return nil }
	want := func(text string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: failed with %v", text, err)
		}
	}
	for text, cfg := range map[string]consumer.Config{
		"consumer: Config.Secrets is empty":  {},
		"both Secrets and Verify":            with(func(c *consumer.Config) { c.Verify.AllowUnsigned = true }),
		"Verify.Custom beside":               with(func(c *consumer.Config) { c.Verify.Custom = timedScheme }),
		"Verify.Custom alone":                {Verify: consumer.Verify{Custom: timedScheme, AllowUnsigned: true}},
		"AcceptForeign: they would":          {Verify: consumer.Verify{Custom: timedScheme, AcceptForeign: true}},
		"Config.Secrets[1]":                  with(func(c *consumer.Config) { c.Secrets = []string{receivertest.SecretText, "hunter2"} }),
		"consumer: Config.Receiver is empty": with(func(c *consumer.Config) { c.Receiver = "" }),
		"Config.Receiver: \"naïve\"":         with(func(c *consumer.Config) { c.Receiver = "naïve" }),
		"Config.Source":                      with(func(c *consumer.Config) { c.Source = "naïve" }),
		"Config.Verify.Tolerance":            with(func(c *consumer.Config) { c.Verify.Tolerance = -1 }),
		"Config.Limits.MaxBodyBytes":         with(func(c *consumer.Config) { c.Limits.MaxBodyBytes = -1 }),
		"less than MaxBodyBytes (2)":         with(func(c *consumer.Config) { c.Limits = consumer.Limits{MaxBodyBytes: 2, MaxUnverifiedBytes: 1} }),
		"Config.Limits.BatchLocks":           with(func(c *consumer.Config) { c.Limits.BatchLocks = -1 }),
		"Config.Limits.CommitTimeout":        with(func(c *consumer.Config) { c.Limits.CommitTimeout = -1 }),
		"Config.Isolation":                   with(func(c *consumer.Config) { c.Isolation = 42 }),
		"Config.SenderNotAfter":              with(func(c *consumer.Config) { c.SenderNotAfter = -1 }),
	} {
		_, err := consumer.New(pool, cfg, handle)
		want(text, err)
	}
	_, err := consumer.New(nil, good, handle)
	want("consumer: New needs a pool", err)
	_, err = consumer.New(pool, good, nil)
	want("consumer: New needs a handler", err)
	_, err = consumer.Middleware(nil, good)
	want("consumer: Middleware needs a pool", err)
}

// A message may wait in a log for longer than a signature's tolerance: what counts is when the log
// took it.
func TestMessagesOfALog(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	secret := receivertest.Secret()
	sent := time.Now().Add(-20 * time.Hour)
	for name, c := range map[string]struct {
		stored time.Time
		handle error
		abort  bool
		lower  bool
		want   message.Outcome
	}{
		"stored when it was sent":      {stored: sent.Add(time.Second), want: message.Outcome{Status: 204}},
		"names in lower case":          {stored: sent, lower: true, want: message.Outcome{Status: 204}},
		"stored long after it":         {stored: sent.Add(time.Hour), want: message.Outcome{Verdict: message.Again, Status: 401, Problem: "timestamp-out-of-tolerance"}},
		"the handler refuses for good": {stored: sent, handle: consumer.Permanent(errors.New("never")), want: message.Outcome{Verdict: message.Refused, Status: 422, Problem: "permanent-failure"}},
		"the handler fails":            {stored: sent, handle: errors.New("not now"), want: message.Outcome{Verdict: message.Again, Status: 500, Problem: "handler-failed"}},
		"the handler asks for later":   {stored: sent, handle: consumer.RetryAfter(errors.New("later"), time.Minute), want: message.Outcome{Verdict: message.Again, Status: 503, Problem: "retry-later", Wait: time.Minute}},
		"the handler aborts":           {stored: sent, abort: true, want: message.Outcome{Verdict: message.Again}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			header := http.Header{}
			header.Set(webhook.IdempotencyKey, name)
			header.Set("X-Outbox-Event-Type", "test")
			webhook.Sign(header, []byte("{}"), sent, secret)
			if c.lower {
				header["x-idempotency-key"] = header[webhook.IdempotencyKey]
				delete(header, webhook.IdempotencyKey)
			}
			receive := receivertest.Must(consumer.New(pool, consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}}, func(context.Context, pgx.Tx, consumer.Event) error {
				if c.abort {
					panic(http.ErrAbortHandler)
				}
				return c.handle
			}))
			got := message.Deliver(t.Context(), receive, message.Message{Header: header, Body: []byte("{}"), Stored: c.stored})
			got.Detail = ""
			testkit.Equal(t, "outcome", got, c.want)
		})
	}
}
