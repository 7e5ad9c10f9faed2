package chaos

import (
	"context"
	"net"
	"os/exec"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// apart is for how long a standby gets nothing any more, while its primary works on: what commits
// then is lost with the primary.
const apart = time.Second

// The primary dies, and a standby takes over that lacks the last second: commits, takes and
// settles. The new primary gives out ids, numbers of ranges and of transactions again that relays
// have in memory, for other events. Relays continue at the same address. What the standby has is
// delivered, once in effect, and in order. Some of it is sent again.
func TestPrimaryDiesAndItsStandbyLacksTheLastSecond(t *testing.T) {
	testsize.Long(t)
	s := newStage(t, 1, 0)
	s.making = "failover"
	p := s.primary()
	var dead []string // commits that died with a primary
	ended := s.produceMeanwhile(200, 0)
	for round := range 4 {
		standby := p.follow(s)
		<-time.After(2 * time.Second)
		over := s.fault("", history.Undoes)
		s.relays[0].requests.delay.Store(int64(200 * time.Millisecond)) // so that the standby has events whose outcomes it lacks
		<-time.After(apart)
		from := time.Since(s.history.Began)
		testkit.Must(t, within(s.Ctx, standby, `ALTER SYSTEM SET primary_conninfo = ''`, `SELECT pg_reload_conf()`))
		<-time.After(apart)
		s.must(p.server.Load().StopImmediate(s.Ctx))
		to := time.Since(s.history.Began)
		testkit.Must(t, within(s.Ctx, standby, `SELECT pg_promote()`))
		if round%2 == 1 { // relays come before the server shows its timeline, or after
			testkit.Must(t, within(s.Ctx, standby, `CHECKPOINT`))
		}
		p.server.Store(standby)
		s.until("the new primary", func(ctx context.Context) (bool, error) { return s.outbox.Ping(ctx) == nil, nil })
		s.relays[0].requests.delay.Store(0)
		over()
		lost := s.diedWith(from, to)
		t.Logf("failover %d: %d commits died with the primary", round+1, len(lost))
		if len(lost) == 0 {
			t.Error("the standby lacks nothing")
		}
		dead = append(dead, lost...)
	}
	<-time.After(time.Second)
	ended()
	s.drained()
	s.repeats = 4 * 100 // what was in flight or just settled
	figures, delivered := s.judgeWithout(dead)
	t.Logf("%d requests, %d of them more than one that was accepted; %d of %d commits that died were delivered before", figures.Requests, figures.Repeats, delivered, len(dead))
	if delivered == 0 || figures.Repeats == 0 {
		t.Error("the new primary knew every event and every outcome")
	}
	timeline, err := process.One[int](s.Ctx, s.outbox, `SELECT timeline FROM outbox_identity`)
	s.must(err)
	quarantined, err := process.One[int](s.Ctx, s.outbox, `SELECT count(*) FROM outbox_alert WHERE rule = 'quarantined'`)
	s.must(err)
	logged, err := exec.Command("grep", "-rlF", "the database's timeline changed", s.logs).Output()
	if s.must(err); len(logged) == 0 || timeline != 5 || quarantined != 0 {
		t.Errorf("timeline %d is recorded, %d relays were quarantined; warned: %s", timeline, quarantined, logged)
	}
}

// A primary is the producers' database at one address, whichever server it is now.
type primary struct {
	server  atomic.Pointer[localpg.Server]
	options localpg.Options
}

// primary moves the producers' database to another server than the receivers', with two relays.
func (s *stage) primary() *primary {
	p := &primary{options: localpg.Options{Settings: map[string]string{"synchronous_commit": "on"}}}
	p.server.Store(pgtest.Start(s.t, p.options))
	s.must(p.server.Load().CreateDatabase(s.Ctx, outboxName, ""))
	l, dsn := p.link(s.t)
	s.must(process.Run(s.Ctx, process.Command{Argv: []string{s.Relay, "migrate", "up"}, Env: []string{"OUTBOX_DATABASE_URL=" + dsn}}))
	pool, err := pgxpool.New(s.Ctx, dsn)
	s.must(err)
	s.t.Cleanup(pool.Close)
	s.outbox = pool
	_, err = pool.Exec(s.Ctx, producerTables)
	s.must(err)
	requests := newLink(s.t, func() (net.Conn, error) { return net.Dial("tcp", s.wire.addr) })
	for _, role := range []string{"relay-1", "relay-2"} {
		u := &process.Unit{Role: role, Launch: func(life string, _ int) process.Command { return s.runRelay(life, dsn, requests.addr(), s.wire.addr) }}
		s.relays = append(s.relays, &relay{u, l, requests})
		s.Fill(u)
	}
	return p
}

func (p *primary) link(t *testing.T) (l *link, dsn string) {
	l = newLink(t, func() (net.Conn, error) { return net.Dial("unix", p.server.Load().Dir()+"/.s.PGSQL.5432") })
	return l, "postgres://postgres@" + l.addr() + "/" + outboxName + "?sslmode=disable"
}

// follow returns a standby of the present primary that has all of it.
func (p *primary) follow(s *stage) *localpg.Server {
	options := p.options
	options.CopyOf = pgtest.BaseBackup(s.t, p.server.Load(), true)
	standby := pgtest.Start(s.t, options)
	s.until("the standby to stream", func(ctx context.Context) (bool, error) {
		return process.One[bool](ctx, s.outbox, `SELECT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming')`)
	})
	return standby
}

func within(ctx context.Context, server *localpg.Server, statements ...string) error {
	conn, err := pgx.Connect(ctx, server.DSN(""))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for _, statement := range statements {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}

// diedWith returns the keys that were committed while the standby got nothing, and that it does not
// have. The last bytes before may be among what it did not get.
func (s *stage) diedWith(from, to time.Duration) (keys []string) {
	have := map[string]bool{}
	for _, key := range all(s, s.outbox, `SELECT key FROM sales`, pgx.RowTo[string]) {
		have[key] = true
	}
	for _, c := range s.history.Calls() {
		if c.Kind == history.Commit && c.Outcome != history.Fail && !have[c.Key] && c.To > from-100*time.Millisecond && c.At < to {
			keys = append(keys, c.Key)
		}
	}
	return keys
}

// judgeWithout judges as if some keys had never been committed, as the new primary has it. It
// returns how many of them the receiver has.
func (s *stage) judgeWithout(keys []string) (figures history.Figures, delivered int) {
	s.t.Helper()
	dead := map[string]bool{}
	for _, key := range keys {
		dead[key] = true
	}
	calls := slices.DeleteFunc(s.history.Calls(), func(c history.Call) bool { return dead[c.Key] })
	tables := s.tables()
	had := len(tables.Effects)
	tables.Effects = slices.DeleteFunc(tables.Effects, func(e history.Effect) bool { return dead[e.Key] })
	tables.Processed = slices.DeleteFunc(tables.Processed, func(key string) bool { return dead[key] })
	breaches := history.Check(calls, tables)
	for _, b := range breaches[:min(len(breaches), 30)] {
		s.t.Error(b)
	}
	if len(breaches) > 0 {
		s.keep(tables, breaches)
	}
	return history.Measure(calls, tables), had - len(tables.Effects)
}
