package main

import (
	"context"
	"fmt"
	"time"
)

// A kill is the death of a relay at the demo's hand.
type kill struct {
	life string
	at   time.Time
}

// killRelay kills a relay's present life with SIGKILL and returns when it is gone.
func (s *stage) killRelay(u *unit) kill {
	life, p := u.current()
	k := kill{life: life, at: time.Now()}
	s.history.killed(k)
	p.Signal("KILL")
	<-p.Ended
	return k
}

const selectRegistered = `SELECT EXISTS (SELECT FROM demo_relay WHERE life = $1)`

// registered reports whether a relay's life has begun to work.
func (s *stage) registered(ctx context.Context, life string) (yes bool, err error) {
	err = s.finance.QueryRow(ctx, selectRegistered, life).Scan(&yes)
	return yes, err
}

const selectHolding = `
SELECT count(*) FROM outbox_delivery JOIN demo_relay ON instance = claimed_by WHERE status = 'pending' AND life = $1`

// holding counts the deliveries that a life has claimed and not settled.
func (s *stage) holding(ctx context.Context, life string) (n int, err error) {
	err = s.finance.QueryRow(ctx, selectHolding, life).Scan(&n)
	return n, err
}

const selectPresent = `SELECT EXISTS (SELECT FROM outbox_relay JOIN demo_relay USING (instance) WHERE life = $1)`

const selectLostClaims = `
SELECT count(l.instance), max(r.at)
FROM demo_relay d LEFT JOIN demo_lost_claim l USING (instance) LEFT JOIN outbox_rescue r USING (instance) WHERE d.life = $1`

// A takeover is what became of a killed relay's claims.
type takeover struct {
	kill
	claims int           // that others took over
	took   time.Duration // from the kill until they were free
}

// takenOver waits until no delivery is claimed by a killed relay any more.
func (s *stage) takenOver(k kill) (takeover, error) {
	t := takeover{kill: k}
	err := s.poll("another relay to take over from "+k.life, func(ctx context.Context) (bool, error) {
		var present bool
		if err := s.finance.QueryRow(ctx, selectPresent, k.life).Scan(&present); err != nil || present {
			return false, err
		}
		n, err := s.holding(ctx, k.life)
		return n == 0, err
	})
	if err != nil {
		return t, err
	}
	var free *time.Time
	if err := s.finance.QueryRow(s.ctx, selectLostClaims, k.life).Scan(&t.claims, &free); err != nil {
		return t, fmt.Errorf("count lost claims: %w", err)
	}
	if free != nil {
		t.took = free.Sub(k.at)
	}
	return t, nil
}

const countPending = `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`

// drainPatience is longer than a lease: deliveries that had to wait for one to end show as late, and not as stuck.
const drainPatience = 90 * time.Second

// drained waits until nothing is pending.
func (s *stage) drained() error {
	return s.pollFor(drainPatience, "the backlog to drain", func(ctx context.Context) (bool, error) {
		var n int
		err := s.finance.QueryRow(ctx, countPending).Scan(&n)
		return n == 0, err
	})
}
