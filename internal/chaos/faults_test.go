package chaos

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/process"
)

// endOthers ends every connection but its own and those of useUpConnections.
const endOthers = `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name <> 'chaos' AND pid <> pg_backend_pid() AND backend_type = 'client backend'`

type fault struct {
	name string
	make func(s *stage)
}

// faults are what may be made. Each draws its choices first, so that a seed always gives the same
// faults in the same order.
var faults = []fault{
	{"relay killed", func(s *stage) { s.on(s.relay().Unit, history.Undoes, (*process.Process).Kill) }},
	{"relay frozen", func(s *stage) { s.freeze(s.relay().Unit, s.between(time.Second, 6*time.Second)) }},
	{"relay reloads", func(s *stage) { s.on(s.relay().Unit, history.None, func(p *process.Process) { p.Signal("HUP") }) }},
	{"relays restart in turn", func(s *stage) {
		for _, r := range s.relays {
			s.stopInOrder(r.Unit)
		}
	}},
	receiverKilled,
	{"receiver frozen", func(s *stage) { s.freeze(s.receiver().Unit, s.between(100*time.Millisecond, 5*time.Second)) }},
	{"database crashes", func(s *stage) { s.restart(s.Server.StopImmediate, s.between(0, 2*time.Second)) }},
	{"database stops", func(s *stage) { s.restart(s.Server.Shutdown, s.between(0, 2*time.Second)) }},
	{"connections ended", func(s *stage) {
		s.endOthers(s.outbox)
	}},
	{"connections used up", func(s *stage) { s.useUpConnections(s.between(500*time.Millisecond, 3*time.Second)) }},
	{"tables altered", func(s *stage) { // as a user does who adds a column, and thinks better of it
		defer s.fault(history.Relays, history.Delays)()
		for _, change := range []string{"ADD COLUMN IF NOT EXISTS chaos int", "DROP COLUMN IF EXISTS chaos"} {
			for _, table := range []string{"outbox", "outbox_delivery"} {
				_, err := s.outbox.Exec(s.Ctx, "SET LOCAL lock_timeout = '2s'; ALTER TABLE "+table+" "+change)
				if !hasCode(err, "55P03") {
					s.must(err)
					s.did[s.making]++
				}
			}
		}
	}},
	{"rows locked", func(s *stage) { // by a session that forgot its transaction
		lasts := s.between(time.Second, 3*time.Second)
		defer s.fault(history.Relays, history.Delays)()
		tx, err := s.outbox.Begin(s.Ctx)
		s.must(err)
		locked, err := tx.Exec(s.Ctx, `SELECT FROM outbox_delivery WHERE status = 'pending' LIMIT 20 FOR UPDATE SKIP LOCKED`)
		s.did[s.making] += int(locked.RowsAffected())
		<-time.After(lasts)
		s.must(errors.Join(err, tx.Rollback(s.Ctx)))
	}},
	{"deadlocks", func(s *stage) { s.deadlock(s.between(2*time.Second, 5*time.Second)) }},
	{"transactions serializable", func(s *stage) {
		s.byDefault("default_transaction_isolation = 'serializable'", s.between(time.Second, 4*time.Second))
	}},
	{"transactions repeatable read", func(s *stage) {
		s.byDefault("default_transaction_isolation = 'repeatable read'", s.between(time.Second, 4*time.Second))
	}},
	{"transactions read-only", func(s *stage) {
		s.byDefault("default_transaction_read_only = on", s.between(time.Second, 4*time.Second))
	}},
	{"requests tampered with", func(s *stage) {
		lasts, share := s.between(time.Second, 4*time.Second), 5+s.random.Int64N(45)
		defer s.fault(history.Relays, history.None)() // the requests say it themselves
		s.wire.share.Store(share)
		<-time.After(lasts)
		s.wire.share.Store(1)
	}},
	{"link relay-database", func(s *stage) { r := s.relay(); s.disturb(r.Role, r.database) }},
	{"link relay-receiver", func(s *stage) { r := s.relay(); s.disturb(r.Role, r.requests) }},
	{"link receiver-database", func(s *stage) { r := s.receiver(); s.disturb(r.Role, r.database) }},
	{"take answers lost", func(s *stage) { r := s.relay(); s.loseAnswers(r.Role, r.database, `outbox_range`) }}, // the statement commits
	{"commit answers lost", func(s *stage) { r := s.receiver(); s.loseAnswers(r.Role, r.database, `(?i)\bcommit\b`) }},
	{"settle answers lost", func(s *stage) { r := s.relay(); s.loseAnswers(r.Role, r.database, `outbox_delivery`) }},
}

// poolerDies ends the transactions that pass the pooler at any point of theirs.
var poolerDies = fault{"pooler killed", func(s *stage) {
	away := s.between(0, 2*time.Second)
	for _, role := range s.pooled {
		defer s.fault(role, history.Undoes)()
	}
	s.must(s.pooler.Kill())
	<-time.After(away)
	s.must(s.pooler.Resume())
}}

var receiverKilled = fault{"receiver killed", func(s *stage) { s.on(s.receiver().Unit, history.None, (*process.Process).Kill) }}

// receiversRestart is a fault for receivers that work events.
var receiversRestart = fault{"receivers restart in turn", func(s *stage) {
	for _, r := range s.receivers {
		s.stopInOrder(r.Unit)
	}
}}

func (s *stage) relay() *relay       { return s.relays[s.random.IntN(len(s.relays))] }
func (s *stage) receiver() *receiver { return s.receivers[s.random.IntN(len(s.receivers))] }

func (s *stage) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.random.Int64N(int64(most-least)))
}

// fault records that a role is hit from now on, or [history.Relays] are, or all relays and
// receivers, until the returned function is called; and what that does to relays.
func (s *stage) fault(role string, harm history.Harm) (ended func()) {
	done := s.history.Invoke(history.Record{Kind: history.Fault, Who: role, Harm: harm, Note: s.making})
	return func() { done(history.OK, 0, "") }
}

// on does something to the present life of a role.
func (s *stage) on(u *process.Unit, harm history.Harm, do func(*process.Process)) {
	defer s.fault(u.Role, harm)()
	_, p := u.Current()
	do(p)
}

func (s *stage) freeze(u *process.Unit, lasts time.Duration) {
	s.on(u, history.Undoes, func(p *process.Process) {
		p.Signal("STOP")
		<-time.After(lasts)
		p.Signal("CONT")
	})
}

// stopInOrder ends the present life of a role with SIGTERM, and waits for the next one.
func (s *stage) stopInOrder(u *process.Unit) {
	s.on(u, history.None, func(p *process.Process) {
		if !p.Stop(patience) { // longer than it drains, and nothing else is wrong meanwhile
			s.t.Errorf("%s was still there %s after SIGTERM", u.Role, patience)
		}
	})
	s.reborn(u)
}

// reborn waits until a role has a living process again.
func (s *stage) reborn(u *process.Unit) {
	s.until("the next life of "+u.Role, func(context.Context) (bool, error) {
		_, p := u.Current()
		select {
		case <-p.Ended:
			return false, nil
		default:
			return true, nil
		}
	})
}

// restart stops the database and starts it again.
func (s *stage) restart(stop func(context.Context) error, away time.Duration) {
	defer s.fault("", history.Undoes)()
	s.must(stop(s.Ctx))
	<-time.After(away)
	s.must(s.Server.StartAgain(s.Ctx))
	s.databaseIsBack()
}

// endOthers ends the connections of relays, receivers and producers.
func (s *stage) endOthers(by interface {
	Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
},
) {
	defer s.fault("", history.Undoes)()
	_, err := by.Exec(s.Ctx, endOthers)
	s.must(err)
	s.databaseIsBack()
}

func (s *stage) databaseIsBack() {
	s.outbox.Reset()
	s.inbox.Reset()
	s.until("the database", func(ctx context.Context) (bool, error) {
		return s.outbox.Ping(ctx) == nil && s.inbox.Ping(ctx) == nil, nil
	})
}

// useUpConnections holds every connection that the server has for others than who has one, and ends
// those of the others.
func (s *stage) useUpConnections(lasts time.Duration) {
	defer s.fault("", history.Undoes)()
	var held []*pgx.Conn
	defer func() {
		for _, c := range held {
			_ = c.Close(s.Ctx)
		}
		s.databaseIsBack()
	}()
	for begun := time.Now(); time.Since(begun) < lasts; {
		c, err := pgx.Connect(s.Ctx, s.Server.DSN(outboxName)+"&application_name=chaos")
		if err == nil {
			held = append(held, c)
			continue
		}
		if len(held) > 0 {
			_, _ = held[0].Exec(s.Ctx, endOthers) // and the next turn takes their places
		}
		<-time.After(50 * time.Millisecond)
	}
}

// lockClaimed locks what relays have claimed, the last first, and takes its time.
const lockClaimed = `
SELECT pg_sleep(0.002) FROM (
    SELECT FROM outbox_delivery WHERE status = 'pending' AND lease_expires_at > now() ORDER BY event_id DESC LIMIT 50 FOR UPDATE) d`

// deadlock locks rows in another order than relays, which write the outcomes of what was sent
// first. They wait for each other, and the server ends one of both.
func (s *stage) deadlock(lasts time.Duration) {
	defer s.fault(history.Relays, history.Delays)()
	s.wire.share.Store(50) // only what was attempted before has a row
	defer s.wire.share.Store(1)
	for begun := time.Now(); time.Since(begun) < lasts; {
		locked, err := s.outbox.Exec(s.Ctx, lockClaimed)
		s.did[s.making] += int(locked.RowsAffected())
		if hasCode(err, "40P01") {
			s.deadlocked++
			continue
		}
		s.must(err)
	}
}

// byDefault gives both databases a setting, which new connections have, and ends those that there
// are. Then it takes it back.
func (s *stage) byDefault(setting string, lasts time.Duration) {
	defer s.fault("", history.Delays)()
	conn, err := pgx.Connect(s.Ctx, s.Server.DSN("postgres"))
	s.must(err)
	defer conn.Close(s.Ctx)
	name, _, _ := strings.Cut(setting, " ")
	for _, change := range []string{" SET " + setting, " RESET " + name} {
		for _, database := range []string{outboxName, inboxName} {
			_, err := conn.Exec(s.Ctx, "ALTER DATABASE "+database+change)
			s.must(err)
		}
		s.endOthers(conn)
		<-time.After(lasts)
		lasts = 0
	}
}

// disturb does one of six things to a link.
func (s *stage) disturb(role string, l *link) {
	how, lasts, bytes := s.random.IntN(6), s.between(100*time.Millisecond, 4*time.Second), 1+s.random.Int64N(20_000)
	harm := history.Undoes
	if how == 0 || how > 3 { // nothing is lost
		harm = history.Delays
	}
	defer s.fault(role, harm)()
	switch how {
	case 0:
		l.delay.Store(int64(lasts / 20))
		<-time.After(lasts)
		l.delay.Store(0)
	case 1:
		l.reset()
	case 2: // half-open: what was swallowed is gone, so no connection may continue
		l.silent.Store(true)
		<-time.After(lasts)
		l.reset()
		l.silent.Store(false)
	case 3:
		l.cutAfter.Store(bytes)
		<-time.After(lasts)
		l.cutAfter.Store(0)
	case 4:
		l.slice.Store(1 + bytes%100)
		<-time.After(lasts)
		l.slice.Store(0)
	case 5: // nothing passes, and nothing is lost
		l.delay.Store(int64(lasts / 2))
		<-time.After(lasts / 2)
		l.delay.Store(0)
		<-time.After(lasts / 2)
	}
}

// loseAnswers lets messages that execute a matching statement reach the server, and loses what it
// answers, with the connection.
func (s *stage) loseAnswers(role string, l *link, words string) {
	lasts := s.between(100*time.Millisecond, time.Second)
	defer s.fault(role, history.Undoes)()
	l.loseTo.Store(regexp.MustCompile(words))
	<-time.After(lasts)
	l.loseTo.Store(nil)
	s.did[s.making] += int(l.lost.Swap(0))
}

func hasCode(err error, code string) bool {
	var refused *pgconn.PgError
	return errors.As(err, &refused) && refused.Code == code
}
