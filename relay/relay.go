package relay

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A Relay claims, delivers and settles. Make one with [New]; run it once.
type Relay struct {
	cfg   Config
	lanes map[string]*lane

	pool    *pgxpool.Pool
	store   *store
	session *session
	wake    *wakeup
	alerts  chan struct{} // there may be alerts to tell
	parked  chan struct{} // there may be parked deliveries with a route
	senders sync.WaitGroup

	settlements chan settlement

	// Three ends, in this order. After taking nothing more is claimed or sent; after doing POSTs in flight are cut off;
	// after settling what could not be written is left to the lease.
	taking   context.Context
	doing    context.Context
	settling context.Context

	hurry context.Context // done after Abort
	abort context.CancelFunc
}

const (
	defaultConns = 3
	// settleGrace is how long the last outcomes may take to be written once everything else has ended.
	settleGrace = 5 * time.Second
)

// New returns a Relay, or every mistake in its configuration as joined [Problem]s. It does not touch the network.
func New(cfg Config) (*Relay, error) {
	var mistakes []error
	if cfg.Pool == nil {
		mistakes = append(mistakes, Problem{Path: "database.url", Text: "is not set"})
	}
	for _, problem := range cfg.Validate() {
		mistakes = append(mistakes, problem)
	}
	if err := errors.Join(mistakes...); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if cfg.Name == "" {
		cfg.Name, _ = os.Hostname()
	}
	r := &Relay{
		cfg:         cfg,
		lanes:       make(map[string]*lane, len(cfg.Destinations)),
		wake:        newWakeup(),
		alerts:      make(chan struct{}, 1),
		parked:      make(chan struct{}, 1),
		settlements: make(chan settlement, settleBatch),
	}
	for _, d := range cfg.Destinations {
		l, err := newLane(d, cfg.Version)
		if err != nil {
			return nil, err
		}
		r.lanes[d.Name] = l
	}
	r.session = &session{relay: r}
	r.hurry, r.abort = context.WithCancel(context.Background())
	return r, nil
}

// Run works until ctx is done, then stops taking, lets POSTs in flight end within DrainTimeout, settles them, gives
// back what it has not sent, and returns nil. While the database is away it waits for it, for ever. It returns an error
// only for what waiting cannot mend: one wrapping [ErrSchema] or [ErrPooler].
func (r *Relay) Run(ctx context.Context) error {
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), r.poolConfig())
	if err != nil {
		return fmt.Errorf("open database pool: %w", err)
	}
	defer pool.Close()
	r.pool, r.store = pool, &store{pool: pool}
	if err := r.prepare(ctx); err != nil || ctx.Err() != nil {
		return err
	}

	settling, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	doing, cutOff := context.WithCancel(context.WithoutCancel(ctx))
	defer cutOff()
	present, leave := context.WithCancel(context.WithoutCancel(ctx))
	defer leave()
	r.taking, r.doing, r.settling = ctx, doing, settling

	var takers, settler, presence sync.WaitGroup
	presence.Go(func() { r.session.run(present) })
	settler.Go(r.settleAll)
	takers.Go(func() { (&claimer{relay: r, pace: pace{poll: r.cfg.PollInterval}}).run(ctx) })
	takers.Go(func() { r.maintain(ctx) })
	takers.Go(func() { r.tellAlerts(ctx) })

	<-ctx.Done()
	r.cfg.Log.Info().Dur("drain_timeout", r.cfg.DrainTimeout).Msg("stopping")
	drain := time.AfterFunc(r.cfg.DrainTimeout, cutOff)
	defer drain.Stop()
	defer context.AfterFunc(r.hurry, cutOff)()
	// Once POSTs are cut off, only the database can hold things up, and it may be away.
	defer context.AfterFunc(doing, func() { time.AfterFunc(settleGrace, giveUp) })()
	takers.Wait()
	r.giveBackUnsent()
	r.senders.Wait()
	close(r.settlements)
	last := time.AfterFunc(settleGrace, giveUp)
	defer last.Stop()
	settler.Wait()
	leave()
	presence.Wait()
	for _, l := range r.lanes {
		l.transport.CloseIdleConnections()
	}
	r.cfg.Log.Info().Msg("stopped")
	return nil
}

// Abort ends the drain of a Run that is told to stop, at once or when that happens: POSTs in flight are cut off, and
// attempted again later. It may be called at any time, from any goroutine.
func (r *Relay) Abort() { r.abort() }

// poolConfig returns the connection settings with what the engine's statements rest on.
func (r *Relay) poolConfig() *pgxpool.Config {
	cfg := r.cfg.Pool.Copy()
	if cfg.MaxConns <= 0 || cfg.MaxConns > defaultConns {
		cfg.MaxConns = defaultConns
	}
	for name, value := range sessionSettings {
		cfg.ConnConfig.RuntimeParams[name] = value
	}
	if r.cfg.Schema != "" {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{r.cfg.Schema}.Sanitize()
	}
	return cfg
}

// prepare waits for the database and checks that it is fit.
func (r *Relay) prepare(ctx context.Context) error {
	failing := newBackoff()
	for {
		err := r.store.checkSession(ctx)
		if err == nil {
			err = NewOps(r.pool).CheckSchema(ctx)
		}
		switch {
		case errors.Is(err, ErrSchema), errors.Is(err, ErrPooler):
			return err
		case err == nil, ctx.Err() != nil:
			return nil
		}
		r.databaseError("prepare", err)
		select {
		case <-time.After(failing.NextBackOff()):
		case <-ctx.Done():
			return nil
		}
	}
}

// databaseError tells of a failed statement that will be repeated.
func (r *Relay) databaseError(operation string, err error) {
	r.cfg.Log.Error().Err(err).Str("operation", operation).Msg("database: will be tried again")
	if hasCode(err, readOnlyTransaction) {
		// After a failover these connections may lead to what was the primary, for ever; new ones need not.
		r.pool.Reset()
	}
	if hook := r.cfg.Hooks.DatabaseError; hook != nil {
		hook(operation, err)
	}
}
