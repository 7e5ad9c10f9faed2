package relay

import (
	"context"
	"errors"
)

// A Relay claims, delivers and settles. Make one with [New]; run it once.
type Relay struct{ cfg Config }

// New returns a Relay, or every mistake in its configuration as joined [Problem]s. It does not touch the network.
func New(cfg Config) (*Relay, error) {
	var mistakes []error
	for _, problem := range cfg.Validate() {
		mistakes = append(mistakes, problem)
	}
	if err := errors.Join(mistakes...); err != nil {
		return nil, err
	}
	return &Relay{cfg: cfg.withDefaults()}, nil
}

// Run works until ctx is done, then stops taking, lets POSTs in flight end within DrainTimeout, settles them, gives
// back what it has not sent, and returns nil. While the database is away it waits for it, for ever. It returns an error
// only for what waiting cannot mend: one wrapping [ErrSchema].
func (r *Relay) Run(ctx context.Context) error { return nil }

// Abort ends the drain of a Run that was told to stop: POSTs in flight are cut off and their claims left to rescue. It
// may be called at any time, from any goroutine.
func (r *Relay) Abort() {}
