package chaos

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const (
	receivers     = 2 // processes that share a database, and get requests in turn
	timeout       = 3 * time.Second
	retryAfter    = time.Second      // that the wire asks for, and receivers do
	patience      = 30 * time.Second // for what ought to happen within a second or two
	year          = 365 * 24 * time.Hour
	drainPatience = 90 * time.Second // longer than a lease: what waited for one shows as late, not as stuck
)

const (
	outboxName = "producer"
	inboxName  = "receiver"
	loopback   = "127.0.0.1" // of links and of the wire
)

// A stage is a producers' database with relays, and a receivers' database with receivers. Every
// connection of a relay or a receiver passes its own link. A pooler may stand between links and
// databases.
//
//	producers ── outbox ──link── relays ──link── wire ── receivers ──link── inbox
type stage struct {
	*process.Stage
	t             *testing.T
	seed          uint64
	random        *rand.Rand // of the faults; used by the one goroutine that makes them
	history       *history.History
	wire          *wire
	outbox, inbox *pgxpool.Pool
	pooler        *localpg.Pooler // nil: none
	pooled        []string        // roles whose links lead to the pooler
	relays        []*relay
	receivers     []*receiver
	record        bool           // receivers record events, and work them later
	host          string         // by which relays know what they connect to; empty: its address
	limits        string         // what a shell does before it runs a relay
	logs          string         // a directory with what relays wrote
	config        string         // a file: alerts are sent at once
	making        string         // the fault that is being made
	made          map[string]int // faults by their names
	did           map[string]int // to how many rows, tables or answers, by the names of faults
	torn          []string
	compared      int          // snapshots of effects and processed_events
	repeats       int          // [history.Tables.Repeats]
	replayed      atomic.Int64 // events that a receiver's handler had refused
	deadlocked    int          // deadlocks that ended the statement of the fault, and not that of a relay
	clockMoves    bool         // of the databases
}

// A relay is a role, its link to the database, and its link to the receivers.
type relay struct {
	*process.Unit
	database, requests *link
}

type receiver struct {
	*process.Unit
	database *link
}

var schedule = []time.Duration{100 * time.Millisecond, 300 * time.Millisecond, time.Second}

var relaySettings = []string{
	"OUTBOX_DEFAULTS_RETRY_SCHEDULE=100ms,300ms,1s", "OUTBOX_DEFAULTS_RETRY_MAX_ATTEMPTS=50", "OUTBOX_DEFAULTS_RETRY_RETRY_AFTER_MAX=1s", "OUTBOX_DEFAULTS_BREAKER_PROBE_AFTER=100ms", "OUTBOX_DEFAULTS_BREAKER_PROBE_MAX=500ms",
	"OUTBOX_DEFAULTS_TIMEOUT=" + timeout.String(), "OUTBOX_RELAY_LEASE=60s", "OUTBOX_DATABASE_ALLOW_SUPERUSER=true", "OUTBOX_METRICS_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_LISTEN=none",
}

// binary is the outbox-relay that the tests run, built once from the present sources.
var binary = sync.OnceValues(func() (path string, err error) {
	// Not in a directory for temporary files: a test run that is killed could not remove it.
	if path, err = filepath.Abs("../../bin/outbox-relay-chaos"); err != nil {
		return "", err
	}
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", path, "../../cmd/outbox-relay").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build outbox-relay: %w\n%s", err, out)
	}
	return path, nil
})

// newStage opens a stage with some relays, which ends with t. The server may have more in its
// environment.
func newStage(t *testing.T, seed uint64, relays int, env ...string) *stage {
	t.Helper()
	s := openStage(t, seed, false, env...)
	s.openRelays(relays)
	return s
}

// openStage opens a stage without relays. Its receivers may record events, and work them later.
func openStage(t *testing.T, seed uint64, record bool, env ...string) *stage {
	t.Helper()
	path, err := binary()
	testkit.Must(t, err)
	s := &stage{t: t, logs: t.TempDir(), seed: seed, record: record, random: rand.New(rand.NewPCG(seed, 0)), history: history.New(), made: map[string]int{}, did: map[string]int{}}
	s.config = filepath.Join(t.TempDir(), "alerts.yaml")
	testkit.Must(t, os.WriteFile(s.config, []byte("alerts:\n  after_by_rule: {failed: 0s, breaker_open: 0s}\n"), 0o600))
	// Commit times show an answer that came before its commit. A commit that a crash may undo is no
	// promise.
	settings := map[string]string{"track_commit_timestamp": "on", "synchronous_commit": "on", "deadlock_timeout": "10ms", "log_lock_waits": "on"} // shorter than the lock_timeout of relays
	s.Stage, err = process.OpenStage(t.Context(), path, localpg.Options{Settings: settings, Env: env})
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	testkit.Must(t, err)
	s.outbox, err = s.Database(outboxName, "outbox", producerTables)
	s.must(err)
	for _, rights := range []string{migrations.Roles(), `CREATE ROLE ` + confined + ` LOGIN IN ROLE outbox_relay`} {
		_, err = s.outbox.Exec(s.Ctx, rights, pgx.QueryExecModeSimpleProtocol)
		s.must(err)
	}
	s.inbox, err = s.Database(inboxName, "inbox", receiverTables)
	s.must(err)
	s.wire = newWire(t, s.history, seed)
	if *pooled > 0 {
		s.pooler, err = localpg.StartPooler(s.Server.DSN(outboxName), "default_pool_size = 20") // PgBouncer's own default
		testkit.Must(t, err)
		t.Cleanup(func() { testkit.Must(t, s.pooler.Stop()) })
	}
	for i := range receivers {
		s.openReceiver(i)
	}
	return s
}

// confined is a login with the rights that a relay needs. Every second relay has it, and the others
// are the server's owner.
const confined = "confined"

func (s *stage) openRelays(n int) {
	for i := range n {
		s.openRelay(fmt.Sprintf("relay-%d", i+1), fmt.Sprintf("OUTBOX_DEFAULTS_BATCH_MAX=%d", 1+100*(i%2))) // every second one sends batches
	}
}

// must fails the test on the error of a step. If the play has ended for a reason, that is the
// error.
func (s *stage) must(err error) {
	s.t.Helper()
	testkit.Must(s.t, s.Reason(err))
}

func (s *stage) until(what string, done func(ctx context.Context) (bool, error)) {
	s.t.Helper()
	s.must(s.Poll(patience, what, done))
}

func receiverRole(i int) string { return fmt.Sprintf("receiver-%d", i+1) }

// link returns a link from a role to its database, or to the pooler, and the URL behind it.
func (s *stage) link(role, database string, throughPooler bool) (l *link, dsn string) {
	if !throughPooler {
		return linkTo(s.t, s.Server.DSN(database))
	}
	s.pooled = append(s.pooled, role)
	return linkTo(s.t, s.pooler.DSN(database))
}

func (s *stage) openReceiver(i int) {
	role := receiverRole(i)
	l, dsn := s.link(role, inboxName, i < *pooled)
	if i < *pooled {
		dsn += "&default_query_exec_mode=exec" // PgBouncer keeps no prepared statement
	}
	addr := &s.wire.receivers[i]
	u := &process.Unit{Role: role, Launch: func(string, int) process.Command {
		env := []string{receiverDatabase + "=" + dsn, receiverSecret + "=" + s.Secret}
		if s.record {
			env = append(env, receiverRecords+"=yes")
		}
		return process.Command{Argv: []string{s.Self}, Env: env, Stdout: func(line string) { addr.Store(&line) }}
	}}
	s.receivers = append(s.receivers, &receiver{u, l})
	s.Fill(u)
	s.until(u.Role+" to listen", func(context.Context) (bool, error) { return addr.Load() != nil, nil })
}

func (s *stage) openRelay(name string, settings ...string) {
	through := len(s.relays) < *pooled
	database, dsn := s.link(name, outboxName, through)
	if len(s.relays)%2 == 1 && !through {
		dsn = strings.Replace(dsn, "postgres://postgres@", "postgres://"+confined+"@", 1)
	}
	if through { // the work of one that dies waits for its lease
		settings = append(settings, "OUTBOX_DATABASE_POOLER=transaction", "OUTBOX_RELAY_LEASE="+lease.String())
	}
	requests := newLink(s.t, func() (net.Conn, error) { return net.Dial("tcp", s.wire.addr) })
	u := &process.Unit{Role: name, Rest: 200 * time.Millisecond, Launch: func(life string, number int) process.Command {
		command := s.runRelay(life, dsn, requests.addr(), s.wire.addr, settings...)
		if *oldRelay != "" && number%2 == 1 {
			command.Argv[len(command.Argv)-1] = *oldRelay
		}
		return command
	}}
	s.relays = append(s.relays, &relay{u, database, requests})
	s.Fill(u)
	s.until(name+" to register", func(ctx context.Context) (bool, error) {
		life, _ := u.Current()
		return process.One[bool](ctx, s.outbox, `SELECT EXISTS (SELECT FROM outbox_relay WHERE name = $1)`, life)
	})
}

func (s *stage) runRelay(life, dsn, receivers, alerts string, settings ...string) process.Command {
	write := func(line string) { // what is lost is missed only after a failure
		if log, err := os.OpenFile(filepath.Join(s.logs, life+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err == nil {
			_, _ = fmt.Fprintln(log, line)
			_ = log.Close()
		}
	}
	named := func(url string) string { return strings.Replace(url, loopback, cmp.Or(s.host, loopback), 1) }
	return process.Command{Stderr: write, Argv: []string{"/bin/sh", "-c", s.limits + ` exec "$0" run`, s.Relay}, Env: slices.Concat([]string{
		"OUTBOX_DATABASE_URL=" + named(dsn),
		"OUTBOX_DESTINATION_URL=" + named("http://"+receivers) + "/?relay=" + life,
		"OUTBOX_SIGNING_SECRET=" + s.Secret,
		"OUTBOX_CONFIG=" + s.config, "OUTBOX_ALERTS_CHANNELS_WEBHOOK=" + named("http://"+alerts) + "/alert",
		"OUTBOX_RELAY_NAME=" + life,
	}, relaySettings, settings)}
}

// selectTorn selects what one snapshot has of an effect without its memory, or of a memory without
// its effect. One transaction writes both, so that both have its time. Only those of the last 30 s
// are compared: a run has hundreds of thousands.
const selectTorn = `
WITH e AS (SELECT key, at FROM effects WHERE at > now() - interval '30 s'),
     p AS (SELECT idempotency_key AS key, received_at AS at FROM processed_events WHERE received_at > now() - interval '30 s')
SELECT coalesce(string_agg(format('%s %s', what, key), ', '), '') FROM (
    SELECT 'effect of' AS what, key FROM (TABLE e EXCEPT TABLE p) a UNION ALL SELECT 'memory of', key FROM (TABLE p EXCEPT TABLE e) b LIMIT 10) torn`

// selectTornWork is selectTorn for receivers that record events: one transaction writes the memory
// and the record of an event, and another one its effect and its end.
const selectTornWork = `
WITH e AS (SELECT key FROM effects WHERE at > now() - interval '30 s'),
     p AS (SELECT idempotency_key AS key FROM inbox_events WHERE processed_at > now() - interval '20 s' AND processing_state <> 'failed'),
     m AS (SELECT idempotency_key AS key, received_at FROM processed_events WHERE received_at > now() - interval '30 s'),
     r AS (SELECT idempotency_key AS key, received_at FROM inbox_events WHERE received_at > now() - interval '30 s')
SELECT coalesce(string_agg(format('%s %s', what, key), ', '), '') FROM (
    SELECT 'effect of' AS what, key FROM e JOIN inbox_events ON idempotency_key = key WHERE processing_state NOT IN ('succeeded', 'ignored')
    UNION ALL SELECT 'end of', key FROM (TABLE p EXCEPT TABLE e) b
    UNION ALL SELECT 'memory of', key FROM (TABLE m EXCEPT TABLE r) c
    UNION ALL SELECT 'record of', key FROM (TABLE r EXCEPT TABLE m) d LIMIT 10) torn`

// watch compares effects with processed_events until ctx is done, and once more then.
func (s *stage) watch(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	query := selectTorn
	if s.record {
		query = selectTornWork
	}
	for over := false; !over; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			over = true
		}
		torn, err := process.One[string](s.Ctx, s.inbox, query)
		if err != nil {
			continue // the database is down, or full
		}
		s.compared++
		if torn != "" {
			s.torn = append(s.torn, fmt.Sprintf("%s after the beginning one snapshot has only the %s", time.Since(s.history.Began), torn))
		}
	}
}
