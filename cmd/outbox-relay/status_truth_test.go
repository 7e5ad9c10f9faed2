package main

import (
	"context"
	"database/sql"
	"errors"
	"html"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/page"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A situation is what an operator may meet. stage brings it about with the program, a real database
// and a real receiver.
type situation struct {
	stage    func(t *testing.T, s *stage)
	says     []string // parts of what status says
	commands []string // that status advises, each without its comment
	explains string   // a part of what explain says of event 1; empty: nothing is asked
}

// A stage is where a situation is brought about.
type stage struct {
	dsn string
	db  *sql.DB
	env []string // of the commands
}

// run starts a relay that is stopped with the test.
func (s *stage) run(t *testing.T, env ...string) {
	t.Helper()
	r := start(t, append(s.env, env...), "--poll-interval=1s")
	t.Cleanup(func() {
		r.signals <- syscall.SIGTERM
		r.signals <- syscall.SIGTERM // the drain would wait for a receiver that does not answer
		<-r.code
	})
	r.stderr.wait(t, `"registered"`, r.code)
}

// pageAgrees checks that the page says all that status says, and nothing that contradicts it.
func (s *stage) pageAgrees(t *testing.T) {
	t.Helper()
	outbox := ops.New(pgtest.Pool(t, s.dsn))
	p, err := page.New(page.Config{Control: control.New(control.Config{Outbox: outbox, Environment: s.environment()})})
	pgtest.Must(t, err)
	status, err := outbox.Status(t.Context(), s.environment())
	pgtest.Must(t, err)
	digits := regexp.MustCompile(`(\d+[dhms])+|\d+`) // ages and counts differ from moment to moment
	text := func(path string) string {
		w := httptest.NewRecorder()
		p.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, http.NoBody))
		return digits.ReplaceAllString(html.UnescapeString(w.Body.String()), "N")
	}
	overview := text("/")
	if strings.Contains(overview, "All is well.") != (len(status.Advice) == 0) {
		t.Errorf("the first page says\n%s", overview)
	}
	for _, a := range status.Advice {
		if said := digits.ReplaceAllString(plain.Line(a.Text), "N"); !strings.Contains(overview, said) {
			t.Errorf("the first page does not say %q:\n%s", said, overview)
		}
	}
	for _, d := range status.Destinations {
		content := text("/destinations/" + d.Destination)
		wrong := slices.ContainsFunc(status.Advice, func(a ops.Advice) bool { return a.Subject == d.Destination })
		if strings.Contains(content, "Nothing fails here") == wrong {
			t.Errorf("the page of %s, which is %s, says\n%s", d.Destination, d.State, content)
		}
		if d.State == "held" && !strings.Contains(content, "<dt>Held ") {
			t.Errorf("the page of %s does not say what is held:\n%s", d.Destination, content)
		}
	}
}

// environment returns the name that commands are given.
func (s *stage) environment() (name string) {
	for _, variable := range s.env {
		if value, is := strings.CutPrefix(variable, "OUTBOX_ENVIRONMENT="); is {
			name = value
		}
	}
	return name
}

func (s *stage) insert(t *testing.T, columns, values string) {
	t.Helper()
	execute(t, s.db, "INSERT INTO outbox (event_type, payload, idempotency_key"+columns+") "+values)
}

const oneEvent = `VALUES ('invoice.paid', '{}', 'k1')`

// program runs a command in its own process.
func program(t *testing.T, env []string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append([]string{asProgram + "=1"}, env...)
	out, err := cmd.Output()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		t.Fatalf("%q: %s", args, exit.Stderr)
	} else if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// ran runs a command that has to succeed, in this process.
func ran(t *testing.T, env []string, args ...string) string {
	t.Helper()
	r := command(env, args...)
	if r.code != 0 {
		t.Fatalf("%q: %s", args, r.stderr)
	}
	return r.stdout
}

// answering returns the URL of a receiver that answers every request with a status.
func answering(t *testing.T, status int) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	t.Cleanup(server.Close)
	return server.URL
}

// consuming returns the URL of a receiver made with package consumer, which has the other secret.
func consuming(t *testing.T, secret string, handler http.HandlerFunc) string {
	t.Helper()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	middleware := receivertest.Must(consumer.Middleware(pool, consumer.Config{Receiver: "shop", Secrets: []string{secret}, Logger: slog.New(slog.DiscardHandler)}))
	server := httptest.NewServer(middleware(handler))
	t.Cleanup(server.Close)
	return server.URL
}

// to makes the situation of one event for a destination.
func to(url func(t *testing.T) string, env ...string) func(*testing.T, *stage) {
	return func(t *testing.T, s *stage) {
		s.insert(t, "", oneEvent)
		s.run(t, append(env, "OUTBOX_DESTINATION_URL="+url(t))...)
	}
}

// silent returns the URL of a receiver that never answers.
func silent(t *testing.T) string {
	t.Helper()
	ended := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-ended }))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(ended) })
	return server.URL
}

var situations = map[string]situation{
	"wrong secret": {
		to(func(t *testing.T) string { return consuming(t, otherSecret, nil) }, "OUTBOX_SIGNING_SECRET="+goodSecret),
		[]string{"  failing\n", "1 retrying at default; last: 401 Unauthorized: The request's signature is not valid (signature-invalid)", "Make destinations.default.signing_secrets"},
		[]string{"outbox-relay explain 1"},
		"401 Unauthorized: The request's signature is not valid (signature-invalid)",
	},
	"wrong path": {
		to(func(t *testing.T) string { return answering(t, http.StatusNotFound) }),
		[]string{"  failing\n", "1 retrying at default; last: 404 Not Found.", "Correct destinations.default.url (or OUTBOX_DESTINATION_URL), then reload the relay (SIGHUP)"},
		[]string{"outbox-relay explain 1"},
		"404 Not Found",
	},
	"DNS": {
		to(func(*testing.T) string { return "http://does-not-exist.invalid/" }),
		[]string{`"default" has a name that does not resolve, and its deliveries are held: `, "does-not-exist.invalid", "Correct destinations.default.url (or OUTBOX_DESTINATION_URL), then reload the relay (SIGHUP)"},
		[]string{"outbox-relay resume default --reset-breaker"},
		"does-not-exist.invalid",
	},
	"TLS": {
		to(overTLS),
		[]string{`"default" fails the TLS handshake (certificates), and its deliveries are held: `, "certificate", "Correct destinations.default.tls (such as destinations.default.tls.ca_file)"},
		[]string{"outbox-relay resume default --reset-breaker"},
		"certificate",
	},
	"handler error": {
		to(func(t *testing.T) string {
			return consuming(t, goodSecret, func(w http.ResponseWriter, _ *http.Request) {
				http.Error(w, "no stock", http.StatusInternalServerError)
			})
		}, "OUTBOX_SIGNING_SECRET="+goodSecret),
		[]string{"  failing\n", "1 retrying at default; last: 500 Internal Server Error", "The log of the receiver says more."},
		[]string{"outbox-relay explain 1"},
		"500 Internal Server Error",
	},
	"dead host": {
		to(func(t *testing.T) string { return testkit.NewVacant(t).URL }),
		[]string{`"default" accepts no connection, and its deliveries are held: `, "connection refused", "Start the receiver, or correct destinations.default.url"},
		[]string{"outbox-relay resume default --reset-breaker"},
		"connection refused",
	},
	"closed without an answer": {
		to(func(t *testing.T) string {
			server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
			t.Cleanup(server.Close)
			return server.URL
		}),
		[]string{"  failing\n", "1 retrying at default; last: the receiver closed the connection without an answer."},
		[]string{"outbox-relay explain 1"},
		"closed the connection without an answer",
	},
	"held": {
		func(t *testing.T, s *stage) {
			s.insert(t, "", `SELECT 'invoice.paid', '{}', 'k' || i FROM generate_series(1, 50) i`)
			s.run(t, "OUTBOX_DESTINATION_URL="+testkit.NewVacant(t).URL, "OUTBOX_DEFAULTS_RETRY_SCHEDULE=100ms")
		},
		[]string{`"default" accepts no connection, and its deliveries are held: `, "connection refused", "Nothing is lost: a relay tries it"},
		[]string{"outbox-relay resume default --reset-breaker"},
		"held: its requests fail",
	},
	"paused": {
		func(t *testing.T, s *stage) {
			s.run(t, "OUTBOX_DESTINATION_URL="+answering(t, http.StatusOK))
			ran(t, s.env, "pause", "default", "--reason=stocktaking")
			s.insert(t, "", oneEvent)
		},
		[]string{`"default" is paused (stocktaking) since 20`, `: nothing is sent there.`},
		[]string{"outbox-relay resume default"},
		"the destination is paused since",
	},
	"parked": {
		func(t *testing.T, s *stage) {
			file := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), "destinations: {shop: {url: '"+answering(t, http.StatusOK)+"'}}\nroutes: [{event: other, to: [shop]}]\n")
			s.run(t, "OUTBOX_CONFIG="+file)
			s.insert(t, "", oneEvent)
		},
		[]string{"1 event matches no route. Add a route to the relays' configuration and reload them (SIGHUP)."},
		[]string{"outbox-relay events list --parked"},
		"parked: no route matches its type",
	},
	"before the first start": {
		func(t *testing.T, s *stage) { s.insert(t, "", oneEvent) },
		[]string{"No relay is running, so nothing is sent.", "\nNot yet routed: 1, the oldest for "},
		[]string{"outbox-relay run"},
		"not yet routed: no relay has taken it yet; no relay is running",
	},
	"unserved": {
		func(t *testing.T, s *stage) {
			execute(t, s.db, "INSERT INTO outbox_route VALUES ('*', 'old')")
			relaytest.At(t, s.dsn).Cover() // as a relay that had "old" left it
			s.insert(t, "", oneEvent)
			s.run(t, "OUTBOX_DESTINATION_URL="+answering(t, http.StatusOK))
		},
		[]string{`1 delivery is unserved: no running relay has "old". To put it back, write destinations.old into a relay's configuration and reload that relay (SIGHUP); or give them up.`},
		[]string{"outbox-relay discard --destination old --status pending"},
		"unserved: no running relay has this destination",
	},
	"blocked key": {
		func(t *testing.T, s *stage) {
			s.insert(t, ", ordering_key", `SELECT 'invoice.paid', '{}', 'k' || i, 'invoice 42' FROM generate_series(1, 3) i`)
			s.run(t, "OUTBOX_DESTINATION_URL="+answering(t, http.StatusUnprocessableEntity))
		},
		[]string{`1 ordering key waits at "default" behind a failed delivery: invoice 42: 2 wait behind event 1, failed (rejected); last: 422 Unprocessable Entity.`},
		[]string{"outbox-relay explain 1", "outbox-relay replay 1 --destination default", "outbox-relay discard --destination default --head-of-key 'invoice 42'"},
		"failed for good: 422 Unprocessable Entity",
	},
	"quarantined": {
		func(t *testing.T, s *stage) {
			command(append(s.env, "OUTBOX_ENVIRONMENT=production"), "identity", "accept", "--yes")
			s.insert(t, "", oneEvent)
			s.env = append(s.env, "OUTBOX_ENVIRONMENT=staging")
			r := start(t, append(s.env, "OUTBOX_DESTINATION_URL="+answering(t, http.StatusOK)))
			t.Cleanup(func() { r.signals <- syscall.SIGTERM; <-r.code })
			r.stderr.wait(t, "quarantined", r.code)
		},
		[]string{`Nothing is claimed or sent: this is not the database that relays were accepted on: its environment is "staging", recorded is "production".`},
		[]string{"outbox-relay identity show"},
		"",
	},
	"lagging": {
		func(t *testing.T, s *stage) {
			execute(t, s.db, "INSERT INTO outbox_route VALUES ('*', 'default')")
			s.insert(t, ", created_at, available_at", `SELECT 'invoice.paid', '{}', 'k' || i, now() - interval '1 hour', now() - interval '1 hour' FROM generate_series(1, 50) i`)
			s.run(t, "OUTBOX_DESTINATION_URL="+silent(t), "OUTBOX_RELAY_MAX_IN_FLIGHT=1", "OUTBOX_DEFAULTS_TIMEOUT=1m", "OUTBOX_RELAY_LEASE=5m")
		},
		[]string{`Deliveries to "default" lag: the oldest one that is due has waited for 1h`, "raise max_in_flight or rate_limit"},
		[]string{"outbox-relay relays"},
		"",
	},
	"vacuum blocked": {
		func(t *testing.T, s *stage) {
			conn, err := pgx.Connect(t.Context(), s.dsn)
			pgtest.Must(t, err)
			t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
			pgtest.Exec(t, conn, "BEGIN; SELECT pg_current_xact_id()")
			s.run(t, "OUTBOX_DESTINATION_URL="+answering(t, http.StatusOK), "OUTBOX_ALERTS_VACUUM_BLOCKED_OVER=1s")
		},
		[]string{"cannot clean up: process ", "let its owner end it, or run: SELECT pg_terminate_backend("},
		nil, "",
	},
	"all well": {
		to(func(t *testing.T) string { return answering(t, http.StatusOK) }), []string{"\nAll is well.\n"}, nil, "",
	},
}

// What status says, in every situation: the truth, and the command that comes next. explain says
// why event 1 waits.
func TestStatusSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, c := range situations {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 3, "vacuum_blocked")
			t.Parallel()
			dsn := pgtest.New(t, migrations.Outbox)
			s := &stage{dsn: dsn, db: open(t, dsn), env: []string{"OUTBOX_DATABASE_URL=" + dsn}}
			c.stage(t, s)
			var said string
			defer func() {
				if t.Failed() {
					t.Logf("status says\n%s", said)
				}
			}()
			relaytest.Eventually(t, name, func() bool {
				said = command(s.env, "status").stdout
				return !slices.ContainsFunc(c.says, func(part string) bool { return !strings.Contains(said, part) })
			})
			said = ran(t, s.env, "status")
			if name == "vacuum blocked" {
				said = program(t, s.env, "status")
			}
			for _, part := range c.says {
				if !strings.Contains(said, part) {
					t.Errorf("status does not say %q:\n%s", part, said)
				}
			}
			if strings.Contains(said, "All is well.") != (name == "all well") {
				t.Errorf("status says\n%s", said)
			}
			for _, line := range c.commands {
				if !strings.Contains(said, "\n  "+line+"\n") && !strings.Contains(said, "\n  "+line+"    # ") {
					t.Errorf("status does not advise %q:\n%s", line, said)
				}
			}
			s.pageAgrees(t)
			if c.explains == "" {
				return
			}
			if got := ran(t, s.env, "explain", "1"); !strings.Contains(got, c.explains) {
				t.Errorf("explain does not say %q:\n%s", c.explains, got)
			}
		})
	}
}
