package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/process"
)

// listen returns what takes the journal of a life.
func (s *stage) listen(life string) func(line string) {
	return func(line string) {
		var e entry
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			s.fail(fmt.Errorf("%s wrote %q, which is no journal entry: %w", life, line, err))
			return
		}
		s.history.add(life, e)
	}
}

// fill keeps a role filled until the play ends. When that fails, the play ends.
func (s *stage) fill(u *unit) {
	s.units.Go(func() {
		if err := u.run(s.ctx); err != nil {
			s.fail(err)
		}
	})
}

// openReceiver starts logistics and returns when it listens. Each life dies in the effect that dieAfter gives it; beyond
// the list, lives do not die by themselves.
func (s *stage) openReceiver(f faults, dieAfter ...int) error {
	const role = "logistics"
	share := func(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }
	s.receiver = &unit{role: role, ended: func(life string, at time.Time) {
		s.history.died(life, at)
		if s.onCrash != nil && !s.history.behaves() {
			s.onCrash(life)
		}
	}}
	s.receiver.launch = func(life string, number int) (*process.Process, error) {
		if s.history.behaves() {
			f = faults{}
		}
		argv := []string{
			s.self, role, "--database", s.server.DSN(logisticsName), "--seed", strconv.FormatUint(s.seed, 10),
			"--late", share(f.Late), "--refuse", share(f.Refuse), "--lose", share(f.Lose),
		}
		if addr := s.history.address(); addr != "" {
			argv = append(argv, "--listen", addr) // where the relays look for it
		}
		if number <= len(dieAfter) {
			argv = append(argv, "--die-after", strconv.Itoa(dieAfter[number-1]))
		}
		return process.Start(process.Command{Argv: argv, Env: []string{"DEMO_SECRET=" + s.secret}, Stdout: s.listen(life)})
	}
	s.fill(s.receiver)
	return s.await("logistics to listen", func(h *history) bool { return h.addr != "" })
}

// openRelay starts an outbox-relay and returns when it is registered. env adds to its settings.
func (s *stage) openRelay(role string, env ...string) (*unit, error) {
	u := &unit{role: role, rest: s.absence, ended: func(string, time.Time) {}}
	u.launch = func(life string, _ int) (*process.Process, error) {
		settings := append([]string{
			"OUTBOX_DATABASE_URL=" + s.server.DSN(financeName),
			"OUTBOX_DESTINATION_URL=http://" + s.history.address() + webhookPath + "?relay=" + life,
			"OUTBOX_SIGNING_SECRET=" + s.secret,
			"OUTBOX_NAME=" + life,
		}, env...)
		return process.Start(process.Command{Argv: []string{s.relay, "run"}, Env: settings})
	}
	s.fill(u)
	return u, s.poll(role+" to register", func(ctx context.Context) (bool, error) {
		life, _ := u.current()
		return s.registered(ctx, life)
	})
}

// An order is what finance is told to issue.
type order struct {
	prefix             string
	invoices           int
	perSecond          float64 // 0: as fast as possible
	block              int     // how many of them at once; 0: one
	rollback, plainSQL float64 // shares
	keys               int     // ordering keys; 0: none
}

// issue runs finance and returns when everything is issued.
func (s *stage) issue(o order) error {
	argv := []string{
		s.self, "finance", "--database", s.server.DSN(financeName), "--seed", strconv.FormatUint(s.seed, 10),
		"--prefix", o.prefix, "--invoices", strconv.Itoa(o.invoices), "--rate", fmt.Sprint(o.perSecond), "--block", strconv.Itoa(max(o.block, 1)),
		"--rollback", fmt.Sprint(o.rollback), "--plain-sql", fmt.Sprint(o.plainSQL), "--keys", strconv.Itoa(o.keys),
	}
	if err := process.Run(s.ctx, process.Command{Argv: argv, Stdout: s.listen("finance." + o.prefix)}); err != nil {
		return fmt.Errorf("finance: %w", err)
	}
	return nil
}

// behave ends the receiver's faults. When it returns, everything the receiver wrote before has arrived in the history: it waits for
// the receiver to say so once more, also after it has said so before.
func (s *stage) behave() error {
	said := s.history.saidToBehave()
	_, p := s.receiver.current()
	p.Signal("USR1")
	return s.await("logistics to behave", func(h *history) bool { return h.behaved > said })
}
