package relay

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/relay/alert"
)

// A pager is a channel that remembers what it was told.
type pager struct {
	name   string
	answer func(n int) error // to the nth notification; nil: always taken

	mu   sync.Mutex
	told []alert.Alert
}

func (p *pager) Name() string { return p.name }

func (p *pager) Notify(_ context.Context, a alert.Alert) error {
	p.mu.Lock()
	n := len(p.told) + 1
	p.told = append(p.told, a)
	p.mu.Unlock()
	if p.answer != nil {
		return p.answer(n)
	}
	return nil
}

// heard returns "rule subject state" of every notification, sorted.
func (p *pager) heard() (all []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.told {
		all = append(all, a.Rule+" "+a.State())
	}
	slices.Sort(all)
	return all
}

func (p *pager) last() alert.Alert {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.told[len(p.told)-1]
}

// of returns the notifications under one rule, in the order in which they came.
func (p *pager) of(rule string) (alerts []alert.Alert) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.told {
		if a.Rule == rule {
			alerts = append(alerts, a)
		}
	}
	return alerts
}

// states returns what of an alert under one rule, firing or resolved, was told, in that order.
func (p *pager) states(rule string) (states []string) {
	for _, a := range p.of(rule) {
		states = append(states, a.State())
	}
	return states
}

// await waits until an alert under a rule has been told in the given state.
func (p *pager) await(t testing.TB, rule, state string) {
	t.Helper()
	eventually(t, rule+" "+state, func() bool { return slices.Contains(p.states(rule), state) })
}
