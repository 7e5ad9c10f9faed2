package session

import "sync"

// Presence is as what a relay is registered. The zero value is not registered. It is safe for concurrent use.
type Presence struct {
	mu       sync.Mutex
	instance int32
	alive    bool
}

// Current returns the number under which the relay claims, 0 before it has one, and whether it counts as alive.
func (p *Presence) Current() (instance int32, alive bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.instance, p.alive
}

// Set replaces what Current returns.
func (p *Presence) Set(instance int32, alive bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.instance, p.alive = instance, alive
}
