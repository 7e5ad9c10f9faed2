package consumer_test

import (
	"io"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestFirstThenDuplicate(t *testing.T) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		wantFirst(t, e.post("k1", `{"n":1}`), http.StatusCreated, `{"done":"k1"}`)
		e.wantResult(consumer.ResultProcessed)

		again := e.post("k1", `{"n":1}`)
		wantReplayed(t, again, http.StatusCreated, "")
		for _, name := range []string{"Content-Type", "X-Handler"} {
			if got := again.header.Get(name); got != "" {
				t.Errorf("%s of the first answer comes again: %q", name, got)
			}
		}
		report := e.wantResult(consumer.ResultDuplicate)
		if report.Event.Key != "k1" || report.Status != http.StatusCreated || report.Err != nil {
			t.Errorf("report %+v", report)
		}
		e.wantRows("k1", 1, 1)
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
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				e := newEnv(t, f, consumer.Config{}, func(*env) http.HandlerFunc { return c.handler })
				wantFirst(t, e.post("k", "{}"), c.status, c.body)
				wantReplayed(t, e.post("k", "{}"), c.status, "")
			})
		}
	})
}

// The first answer has the handler's headers as they were when it wrote the status.
func TestHeadersOfTheHandlerAreSent(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, func(*env) http.HandlerFunc {
			return func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Set-Cookie", "session=secret")
				w.Header().Add("Vary", "Accept")
				w.Header().Add("Vary", "Origin")
				w.WriteHeader(http.StatusOK)
				w.Header().Set("X-Late", "after WriteHeader")
			}
		})
		if h := e.post("k", "{}").header; h.Get("Set-Cookie") == "" || len(h.Values("Vary")) != 2 || h.Get("X-Late") != "" {
			t.Errorf("answered %v", h)
		}
	})
}

// The status that admission anticipates is not written again.
func TestNoContentIsWrittenOnce(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				effect(e)(discardWriter{}, r)
				w.Header().Set("X-Kind", "express")
				w.WriteHeader(http.StatusNoContent)
			}
		})
		wantFirst(t, e.post("k", "{}"), 204, "")
		wantReplayed(t, e.post("k", "{}"), 204, "")
		e.wantRows("k", 1, 1)
		// What is never written twice has been written by one statement of its transaction; an UPDATE is a later one.
		if n := e.count("SELECT count(*) FROM processed_events WHERE cmin = '0'::cid"); n != 1 {
			t.Errorf("%d rows were written once, want 1", n)
		}
	})
}

func TestReusedKeyIsRefused(t *testing.T) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		e.post("k", `{"amount":1}`)
		e.wantResult(consumer.ResultProcessed)
		wantProblem(t, e.post("k", `{"amount":2}`), 422, "key-reused")
		e.wantResult(consumer.ResultKeyReused)
		wantReplayed(t, e.post("k", `{"amount":1}`), http.StatusCreated, "")
		e.wantRows("k", 1, 1)
	})
}

func TestOtherThan2xxRollsBackAndPasses(t *testing.T) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				status, err := strconv.Atoi(r.Header.Get("Test-Status"))
				mustNot(e, err)
				effect(e)(&statusOverride{w, status}, r)
			}
		})
		for _, code := range []int{300, 302, 304, 307, 400, 404, 409, 410, 422, 429, 500, 503, 599, 999} {
			key := "k" + strconv.Itoa(code)
			got := e.do(e.newRequest(key, "{}", with("Test-Status", strconv.Itoa(code))))
			if got.status != code || got.header.Get("X-Handler") != "ran" {
				t.Errorf("status %d %v, want %d", got.status, got.header, code)
			}
			if body := `{"done":"` + key + `"}`; code != 304 && got.body != body {
				t.Errorf("%d: body %q, want %q", code, got.body, body)
			}
			e.wantResult(consumer.ResultFailed)
			e.wantRows(key, 0, 0)

			// The retry runs it: nothing remembers the failure.
			wantFirst(t, e.do(e.newRequest(key, "{}", with("Test-Status", "200"))), 200, `{"done":"`+key+`"}`)
			e.wantRows(key, 1, 1)
			e.wantResult(consumer.ResultProcessed)
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
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		// Without a connection nothing runs: failing open would process events twice.
		e.mustExec("ALTER TABLE processed_events RENAME TO elsewhere")
		wantProblem(t, e.post("k", "{}"), 503, "database-unavailable")
		if report := e.wantResult(consumer.ResultUnavailable); report.Err == nil {
			t.Error("the report has no error")
		}
		if !strings.Contains(e.logged.String(), "level=ERROR") {
			t.Errorf("logged %s", e.logged)
		}
		e.mustExec("ALTER TABLE elsewhere RENAME TO processed_events")
		wantFirst(t, e.post("k", "{}"), http.StatusCreated, `{"done":"k"}`)

		wantProblem(t, unreachable(t, f, consumer.Config{}).post("k2", "{}"), 503, "database-unavailable")
	})
}

// Connections that a restart broke must not make the receiver give up: it refuses while the database is away, and works
// as soon as it is back.
func TestDatabaseStopsAndComesBack(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"synchronous_commit": "on"}}) // or the crash loses commits
		dsn := server.DSN("postgres")
		pgtest.Migrate(t, dsn, migrations.Inbox)
		e := newEnvAt(t, f, dsn, consumer.Config{}, effect)
		e.mustExec(schema)
		wantFirst(t, e.post("before", "{}"), 201, `{"done":"before"}`)
		if err := server.StopImmediate(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 2 { // once on a broken connection, once on none
			wantProblem(t, e.post("after", "{}"), 503, "database-unavailable")
		}
		if err := server.StartAgain(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantReplayed(t, e.post("before", "{}"), 201, "")
		wantFirst(t, e.post("after", "{}"), 201, `{"done":"after"}`)
	})
}

// Behind a connection pooler pgx runs in another mode, with other rules for parameter types.
func TestEveryQueryExecMode(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
			t.Run(mode, func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				dsn := withSetting(pgtest.New(t, migrations.Inbox), "default_query_exec_mode", mode)
				e := newEnvAt(t, f, dsn, consumer.Config{}, effect)
				for statement := range strings.SplitSeq(schema, ";") {
					e.mustExec(statement)
				}
				wantFirst(t, e.post("k", "{}"), 201, `{"done":"k"}`)
				wantReplayed(t, e.post("k", "{}"), 201, "")
				wantProblem(t, e.post("k", "[]"), 422, "key-reused")
			})
		}
	})
}

// unreachable is a receiver whose database refuses connections. What it answers other than 503, it answers without one.
func unreachable(t *testing.T, f flavour, cfg consumer.Config) *env {
	e := newEnvAt(t, f, "postgres://stranger@127.0.0.1:1/none?sslmode=disable", cfg, func(*env) http.HandlerFunc {
		return func(http.ResponseWriter, *http.Request) { t.Error("the handler ran without a database") }
	})
	return e
}

func TestHandlerSeesTheVerifiedEventAndTheWholeBody(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		seen := make(chan consumer.Event, 1)
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
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
		got := e.do(e.newRequest("invoice/1.created v2", body, func(h http.Header) {
			h.Set(webhook.EventVersion, "3")
			h.Set(webhook.EventID, "9007199254740993")
			h.Set(webhook.CreatedAt, "2026-01-02T03:04:05.678901Z")
			h.Set(webhook.RelatedReference, "INV-1")
			h.Set(webhook.OrderingKey, "customer 7")
			h.Set(webhook.Sequence, "12")
			h.Set(webhook.Attempt, "4")
			h.Set(webhook.DeliveryID, "d-1")
			h.Set(webhook.NotAfter, "2126-02-02T03:04:05Z")
			h.Set(webhook.Replay, "true")
			h.Set(webhook.TraceParent, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
			h.Set(webhook.TraceState, "vendor=1")
		}))
		wantFirst(t, got, 200, body)
		event := <-seen
		created, until := event.CreatedAt, event.NotAfter
		event.CreatedAt, event.NotAfter = event.CreatedAt.UTC(), event.NotAfter.UTC()
		want := consumer.Event{
			Receiver: "test", Source: "outbox", Key: "invoice/1.created v2", Type: "invoice.created", Version: 3, ID: 9007199254740993,
			CreatedAt: created, RelatedReference: "INV-1", OrderingKey: "customer 7", Sequence: 12, Attempt: 4,
			DeliveryID: "d-1", NotAfter: until, Replay: true,
			TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", TraceState: "vendor=1",
			Payload: []byte(body),
		}
		if !reflect.DeepEqual(event, want) || created.UnixMicro() != 1767323045678901 || until.Unix() != 4925675045 {
			t.Errorf("event %+v\nwant  %+v", event, want)
		}
		if n := e.count(`SELECT count(*) FROM processed_events WHERE source = 'outbox' AND event_type = 'invoice.created'
			AND event_version = 3 AND related_reference = 'INV-1' AND processing_state = 'succeeded' AND processed_at >= received_at`); n != 1 {
			t.Error("the inbox row does not describe the event")
		}
	})
}

func TestSourcesKeepTheirKeysApart(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		finance := newEnv(t, f, consumer.Config{Receiver: "test", Source: "finance"}, effect)
		stock := newEnvAt(t, f, finance.dsn, consumer.Config{Receiver: "test", Source: "stock"}, effect)
		wantFirst(t, finance.post("k", "1"), 201, `{"done":"k"}`)
		wantFirst(t, stock.post("k", "2"), 201, `{"done":"k"}`)
		finance.wantRows("k", 2, 2)
	})
}

func TestInvalidConfigPanics(t *testing.T) {
	t.Parallel()
	good := consumer.Config{Receiver: "test", Secrets: []string{secretText}}
	with := func(change func(*consumer.Config)) consumer.Config {
		c := good
		change(&c)
		return c
	}
	cases := map[string]consumer.Config{
		"Config.Secrets is empty":     {},
		"both Secrets and":            with(func(c *consumer.Config) { c.AllowUnsigned = true }),
		"Verify beside":               with(func(c *consumer.Config) { c.Verify = timedScheme }),
		"Verify alone":                {Verify: timedScheme, AllowUnsigned: true},
		"AcceptForeign: they would":   {Verify: timedScheme, AcceptForeign: true},
		"Config.Secrets[1]":           with(func(c *consumer.Config) { c.Secrets = []string{secretText, "hunter2"} }),
		"Config.Source":               with(func(c *consumer.Config) { c.Source = "naïve" }),
		"Config.Tolerance":            with(func(c *consumer.Config) { c.Tolerance = -1 }),
		"Config.MaxBodyBytes":         with(func(c *consumer.Config) { c.MaxBodyBytes = -1 }),
		"Config.CommitTimeout":        with(func(c *consumer.Config) { c.CommitTimeout = -1 }),
		"Config.Isolation":            with(func(c *consumer.Config) { c.Isolation = 42 }),
		"Config.SenderNotAfter":       with(func(c *consumer.Config) { c.SenderNotAfter = -1 }),
		"Middleware needs a pool":     good,
		"sqlconsumer: Middleware nee": good,
	}
	for want, cfg := range cases {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			defer func() {
				message, _ := recover().(string)
				if !strings.Contains(message, want) || strings.Contains(message, "hunter2") {
					t.Errorf("panic %q, want one with %q", message, want)
				}
			}()
			if strings.HasPrefix(want, "sqlconsumer") {
				consumer.Must(sqlconsumer.Middleware(nil, cfg))
			}
			var pool *pgxpool.Pool
			consumer.Must(consumer.Middleware(pool, cfg))
		})
	}
}
