package session

import "sync"

// Presence is as what a relay is registered. The zero value is not registered. It is safe for
// concurrent use.
type Presence struct {
	mu      sync.Mutex
	relayID int32
	alive   bool
	lost    bool
}

// Current returns the number under which the relay claims, 0 before it has one, and whether it
// counts as alive.
func (p *Presence) Current() (relayID int32, alive bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.relayID, p.alive
}

// Set replaces what Current returns.
func (p *Presence) Set(relayID int32, alive bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lost = p.lost || p.alive && !alive
	p.relayID, p.alive = relayID, alive
}

// WasLost reports whether the relay has ceased to count as alive since the last call, even if it
// counts again.
func (p *Presence) WasLost() (lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	lost, p.lost = p.lost, false
	return lost
}
