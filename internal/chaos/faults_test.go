package chaos

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/process"
)

// faults are what may be made. Each draws its choices first, so that a seed always gives the same faults in the same order.
var faults = []struct {
	name string
	make func(s *stage)
}{
	{"relay killed", func(s *stage) { s.on(s.relay().Unit, (*process.Process).Kill) }},
	{"relay frozen", func(s *stage) { s.freeze(s.relay().Unit, s.between(time.Second, 6*time.Second)) }},
	{"relay reloads", func(s *stage) { s.on(s.relay().Unit, func(p *process.Process) { p.Signal("HUP") }) }},
	{"relays restart in turn", func(s *stage) {
		for _, r := range s.relays {
			s.on(r.Unit, func(p *process.Process) { p.Stop(patience) })
			s.reborn(r.Unit)
		}
	}},
	{"receiver killed", func(s *stage) { s.on(s.receiver().Unit, (*process.Process).Kill) }},
	{"receiver frozen", func(s *stage) { s.freeze(s.receiver().Unit, s.between(100*time.Millisecond, 5*time.Second)) }},
	{"database crashes", func(s *stage) { s.restart(s.Server.StopImmediate, s.between(0, 2*time.Second)) }},
	{"database stops", func(s *stage) { s.restart(s.Server.Shutdown, s.between(0, 2*time.Second)) }},
	{"connections ended", func(s *stage) {
		defer s.fault("")()
		_, err := s.outbox.Exec(s.Ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'`)
		s.must(err)
	}},
	{"connections used up", func(s *stage) { s.useUpConnections(s.between(500*time.Millisecond, 3*time.Second)) }},
	{"tables altered", func(s *stage) { // as a user does who adds a column, and thinks better of it
		defer s.fault("")()
		for _, change := range []string{"ADD COLUMN IF NOT EXISTS chaos int", "DROP COLUMN IF EXISTS chaos"} {
			for _, table := range []string{"outbox", "outbox_delivery"} {
				_, err := s.outbox.Exec(s.Ctx, "SET LOCAL lock_timeout = '2s'; ALTER TABLE "+table+" "+change)
				if !lockNotAvailable(err) {
					s.must(err)
				}
			}
		}
	}},
	{"rows locked", func(s *stage) { // by a session that forgot its transaction
		lasts := s.between(time.Second, 3*time.Second)
		tx, err := s.outbox.Begin(s.Ctx)
		s.must(err)
		_, err = tx.Exec(s.Ctx, `SELECT FROM outbox_delivery WHERE status = 'pending' LIMIT 20 FOR UPDATE SKIP LOCKED`)
		<-time.After(lasts)
		s.must(errors.Join(err, tx.Rollback(s.Ctx)))
	}},
	{"requests tampered with", func(s *stage) {
		lasts, share := s.between(time.Second, 4*time.Second), 5+s.random.Int64N(45)
		s.wire.share.Store(share)
		<-time.After(lasts)
		s.wire.share.Store(1)
	}},
	{"link relay-database", func(s *stage) { r := s.relay(); s.disturb(r.Role, r.database) }},
	{"link relay-receiver", func(s *stage) { r := s.relay(); s.disturb(r.Role, r.requests) }},
	{"link receiver-database", func(s *stage) { r := s.receiver(); s.disturb(r.Role, r.database) }},
	{"commit answers lost, relay", func(s *stage) { r := s.relay(); s.loseAnswers(r.Role, r.database, "commit") }},
	{"commit answers lost, receiver", func(s *stage) { r := s.receiver(); s.loseAnswers(r.Role, r.database, "commit") }},
	{"settle answers lost", func(s *stage) { r := s.relay(); s.loseAnswers(r.Role, r.database, "outbox_delivery") }},
}

func (s *stage) relay() *relay       { return s.relays[s.random.IntN(len(s.relays))] }
func (s *stage) receiver() *receiver { return s.receivers[s.random.IntN(len(s.receivers))] }

func (s *stage) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.random.Int64N(int64(most-least)))
}

// fault records that a role is hit from now on, or all relays and receivers are, until the returned function is called.
func (s *stage) fault(role string) (ended func()) {
	done := s.history.Invoke(history.Record{Kind: history.Fault, Who: role, Note: s.making})
	return func() { done(history.OK, 0) }
}

// on does something to the present life of a role.
func (s *stage) on(u *process.Unit, do func(*process.Process)) {
	defer s.fault(u.Role)()
	_, p := u.Current()
	do(p)
}

func (s *stage) freeze(u *process.Unit, lasts time.Duration) {
	s.on(u, func(p *process.Process) {
		p.Signal("STOP")
		<-time.After(lasts)
		p.Signal("CONT")
	})
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
	defer s.fault("")()
	s.must(stop(s.Ctx))
	<-time.After(away)
	s.must(s.Server.StartAgain(s.Ctx))
	s.databaseIsBack()
}

func (s *stage) databaseIsBack() {
	s.outbox.Reset()
	s.inbox.Reset()
	s.until("the database", func(ctx context.Context) (bool, error) {
		return s.outbox.Ping(ctx) == nil && s.inbox.Ping(ctx) == nil, nil
	})
}

// useUpConnections holds every connection that the server has for others than who has one, and ends those of the others.
func (s *stage) useUpConnections(lasts time.Duration) {
	defer s.fault("")()
	var held []*pgx.Conn
	defer func() {
		for _, c := range held {
			_ = c.Close(s.Ctx)
		}
		s.databaseIsBack()
	}()
	const endOthers = `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name <> 'chaos' AND pid <> pg_backend_pid() AND backend_type = 'client backend'`
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

// disturb does one of six things to a link.
func (s *stage) disturb(role string, l *link) {
	how, lasts, bytes := s.random.IntN(6), s.between(100*time.Millisecond, 4*time.Second), 1+s.random.Int64N(20_000)
	defer s.fault(role)()
	switch how {
	case 0:
		l.delay.Store(int64(lasts / 20))
		<-time.After(lasts)
		l.delay.Store(0)
	case 1:
		l.reset()
	case 2: // half-open: what was swallowed is gone, so no connection may go on
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

// loseAnswers lets messages that hold a word reach the server, and loses what it answers, with the connection.
func (s *stage) loseAnswers(role string, l *link, word string) {
	lasts := s.between(100*time.Millisecond, time.Second)
	defer s.fault(role)()
	text := []byte(word)
	l.loseTo.Store(&text)
	<-time.After(lasts)
	l.loseTo.Store(nil)
}

func lockNotAvailable(err error) bool {
	var refused *pgconn.PgError
	return errors.As(err, &refused) && refused.Code == "55P03"
}
