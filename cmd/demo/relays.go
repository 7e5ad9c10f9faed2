package main

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/process"
)

const selectRegistered = `SELECT EXISTS (SELECT FROM demo_relay WHERE life = $1)`

// openRelay starts an outbox-relay and returns when it is registered. env adds to its settings.
func (s *stage) openRelay(role string, env ...string) (*process.Unit, error) {
	u := &process.Unit{Role: role, Rest: s.absence, Launch: func(life string, _ int) process.Command {
		return process.Command{Argv: []string{s.Relay, "run"}, Env: append([]string{
			"OUTBOX_DATABASE_URL=" + s.Server.DSN(financeName),
			"OUTBOX_DESTINATION_URL=http://" + s.network.addr + webhookPath + "?relay=" + life,
			"OUTBOX_SIGNING_SECRET=" + s.Secret,
			"OUTBOX_RELAY_NAME=" + life,
		}, env...)}
	}}
	s.Fill(u)
	return u, s.Poll(patience, role+" to register", func(ctx context.Context) (bool, error) {
		life, _ := u.Current()
		return process.One[bool](ctx, s.finance, selectRegistered, life)
	})
}

// A takeover is what becomes of a killed relay's claims.
type takeover struct {
	life   string
	at     time.Time     // of the kill
	claims int           // that others took over, and events of ranges
	took   time.Duration // from the kill until they were free
}

// killRelay kills a relay's present life with SIGKILL and returns when it is gone.
func (s *stage) killRelay(u *process.Unit) *takeover {
	life, p := u.Current()
	s.note("killed", life)
	t := &takeover{life: life, at: time.Now()}
	p.Kill()
	return t
}

const selectHolding = `
SELECT coalesce(sum((SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND claimed_by = r.relay_id)
     + (SELECT coalesce(sum(demo_unsettled(g)), 0) FROM outbox_range g WHERE ended_at IS NULL AND g.relay_id = r.relay_id)), 0)::bigint
FROM demo_relay r WHERE life = $1` // no row: it has not registered yet

// holding counts the deliveries that a life has claimed and not settled, and the events of its open
// ranges.
func (s *stage) holding(ctx context.Context, life string) (int, error) {
	return process.One[int](ctx, s.finance, selectHolding, life)
}

// killBusy is killRelay once the relay has more than some in hand, or after a while.
func (s *stage) killBusy(u *process.Unit, some int, while time.Duration) (t *takeover, holding int, err error) {
	life, _ := u.Current()
	waiting := time.Now()
	err = s.Poll(patience, life+" to be busy", func(ctx context.Context) (busy bool, err error) {
		holding, err = s.holding(ctx, life)
		return holding > some || time.Since(waiting) > while, err
	})
	if err != nil {
		return nil, 0, err
	}
	return s.killRelay(u), holding, nil
}

const selectForgotten = `
SELECT NOT EXISTS (SELECT FROM outbox_relay JOIN demo_relay ON relay_id = id WHERE life = $1)
   AND NOT EXISTS (SELECT FROM outbox_delivery JOIN demo_relay ON relay_id = claimed_by WHERE status = 'pending' AND life = $1)
   AND NOT EXISTS (SELECT FROM outbox_range JOIN demo_relay USING (relay_id) WHERE ended_at IS NULL AND life = $1)`

const selectLostClaims = `
SELECT coalesce(sum((SELECT count(*) FROM demo_lost_claim WHERE relay_id = d.relay_id) + (SELECT coalesce(sum(events), 0) FROM demo_lost_range WHERE relay_id = d.relay_id)), 0)::bigint,
       coalesce(max((SELECT max(at) FROM outbox_rescue WHERE relay_id = d.relay_id)) - $2, '0')
FROM demo_relay d WHERE life = $1` // no row: it was killed before it registered, and lost nothing

// takenOver waits until a killed relay has no delivery claimed, and no range open, any more.
func (s *stage) takenOver(t *takeover) error {
	if err := s.Poll(patience, "another relay to take over from "+t.life, func(ctx context.Context) (bool, error) {
		return process.One[bool](ctx, s.finance, selectForgotten, t.life)
	}); err != nil {
		return err
	}
	return s.finance.QueryRow(s.Ctx, selectLostClaims, t.life, t.at).Scan(&t.claims, &t.took)
}
