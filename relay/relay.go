package relay

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/breaker"
	"github.com/outbox-relay/outbox-relay/relay/identity"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
	"github.com/outbox-relay/outbox-relay/relay/routes"
	"github.com/outbox-relay/outbox-relay/relay/session"
	"github.com/outbox-relay/outbox-relay/relay/watch"
)

// A Relay claims, delivers and settles. Make one with [New]; run it once.
type Relay struct {
	cfg     Config // what a reload cannot change; the rest of it is empty
	reloads reloads

	core
	chores  pg.Pool // for what is done beside delivering: one statement at a time
	session *session.Session
	settler *settler
	senders *senders
	watcher *watch.Watcher

	restTimes int // see the constant; less in tests, where a busy machine would make the rests last for minutes

	// pressed says why the database needs to be left alone for now; nil: never.
	pressed func() (reason string, pressed bool)

	hurry context.Context // done after Abort
	abort context.CancelFunc
	fail  context.CancelCauseFunc // ends Run for what waiting cannot mend
}

// settleGrace is how long the last outcomes may take to be written once everything else has ended.
const settleGrace = 5 * time.Second

// New returns a Relay, or every mistake in its configuration as joined [Problem]s. It does not touch the network.
func New(cfg Config) (*Relay, error) {
	cfg, err := complete(cfg)
	if err != nil {
		return nil, err
	}
	r := &Relay{
		cfg: cfg.fixed(), core: core{store: &store{}, wake: newWakeup()}, restTimes: restTimes,
	}
	r.effective.Store(&cfg)
	for _, d := range cfg.Destinations {
		e, err := post.NewEndpoint(d, cfg.Version)
		if err != nil {
			return nil, err
		}
		e.Log = cfg.Log
		r.lanes.add(newLane(e))
	}
	r.settler = &settler{core: &r.core, settlements: make(chan settlement, settleBatch)}
	r.senders = &senders{core: &r.core, settler: r.settler}
	r.reloads.keeper = routes.Keeper{
		Name: cfg.Name, Log: cfg.Log, Added: func() { signal(r.wake.parked) }, Failed: r.databaseError,
	}
	r.session = r.newSession()
	r.watcher = r.newWatcher()
	r.pressed = func() (string, bool) { reason := r.watcher.Pressure(); return reason, reason != "" }
	r.hurry, r.abort = context.WithCancel(context.Background())
	return r, nil
}

func (r *Relay) guardConfig() identity.Config {
	cfg := identity.Config{
		Name: r.cfg.Name, Version: r.cfg.Version, Environment: r.cfg.Environment,
		Interval: identity.DefaultInterval, Grace: identity.DefaultGrace, AlertEvery: alert.Retry,
		Log: r.cfg.Log, Quarantined: r.cfg.Hooks.Quarantined, Failed: r.databaseError,
		Alert: func() { signal(r.wake.alerts) }, Disown: func() { r.presence.Set(0, false) },
	}
	if conn := r.cfg.Pool.ConnConfig; conn != nil {
		cfg.Address = identity.Address(conn)
	}
	return cfg
}

// Run works until ctx is done. Then it stops claiming, gives back what it has not sent, lets POSTs in flight end within
// DrainTimeout, settles them, deregisters, and returns nil. While the database is away it waits for it, for ever. It returns an error
// only for what waiting cannot mend: one wrapping [ErrSchema] or [ErrPooler].
func (r *Relay) Run(ctx context.Context) error {
	r.reloads.begin(ctx)
	if err := r.session.Open(ctx); err != nil {
		return err
	}
	r.setDatabase(r.session.Database)
	defer func() { r.store.direct.Close() }()
	if err := r.prepare(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	ctx, r.fail = context.WithCancelCause(ctx)
	defer r.fail(nil)

	r.session.Guard.Shut()
	settling, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	doing, cutOff := context.WithCancel(context.WithoutCancel(ctx))
	defer cutOff()
	present, leave := context.WithCancel(context.WithoutCancel(ctx))
	defer leave()
	r.taking, r.doing, r.settling = ctx, doing, settling

	var takers, settler, presence sync.WaitGroup
	presence.Go(func() { r.session.Run(present) })
	settler.Go(r.settler.run)
	takers.Go(func() { r.newClaimer().run(ctx) })
	takers.Go(func() { r.maintain(ctx) })
	takers.Go(func() { r.alerter().Run(ctx) })
	takers.Go(func() { r.watcher.Run(ctx) })
	takers.Go(func() { (&post.Readiness{Endpoints: r.lanes.endpoints, Log: r.config().Log}).Run(ctx) })

	<-ctx.Done()
	drainTimeout := r.config().DrainTimeout
	r.cfg.Log.Info().Dur("drain_timeout", drainTimeout).Msg("stopping")
	drain := time.AfterFunc(drainTimeout, cutOff)
	defer drain.Stop()
	defer context.AfterFunc(r.hurry, cutOff)()
	// Once POSTs are cut off, only the database can hold things up, and it may be away.
	defer context.AfterFunc(doing, func() { time.AfterFunc(settleGrace, giveUp) })()
	takers.Go(r.withdrawRoutes)
	takers.Wait()
	r.senders.giveBackUnsent()
	r.senders.wait()
	close(r.settler.settlements)
	last := time.AfterFunc(settleGrace, giveUp)
	defer last.Stop()
	settler.Wait()
	leave()
	presence.Wait()
	for _, l := range r.lanes.all() {
		l.current().Retire()
	}
	r.cfg.Log.Info().Msg("stopped")
	if cause := context.Cause(ctx); errors.Is(cause, pg.ErrSchema) {
		return cause
	}
	return nil
}

// Abort ends the drain of a Run that is told to stop, at once or when that happens: POSTs in flight are cut off, and
// attempted again later. It may be called at any time, from any goroutine.
func (r *Relay) Abort() { r.abort() }

// setDatabase gives every part what it runs its statements on.
func (r *Relay) setDatabase(db session.Database) {
	r.session.Database = db
	r.store.direct, r.store.pool = db.Direct, db.Pool
	r.chores = pg.NewChores(db.Pool)
	r.watcher.DB, r.reloads.keeper.DB = r.chores, db.Pool
}

// newClaimer returns what claims.
func (r *Relay) newClaimer() *claimer {
	return &claimer{
		core: &r.core, senders: r.senders, settler: r.settler, restTimes: r.restTimes, pace: policy.Pace{Poll: r.cfg.PollInterval},
		breakers: breakerKeeper{core: &r.core, Keeper: breaker.Keeper{
			DB: r.store.pool, Log: r.cfg.Log, Poll: r.cfg.PollInterval, Due: func() { signal(r.wake.alerts) },
		}},
	}
}

// newWatcher returns what looks around the database.
func (r *Relay) newWatcher() *watch.Watcher {
	return &watch.Watcher{
		Config: func() watch.Config { return r.cfg.Watching }, Alerts: func() alert.Config { return r.config().Alerts },
		Lenient: r.lenient, Alive: r.alive,
		// However long a blocked vacuum makes it: like sweeps, it may take a hundredth of the time.
		Rest: func(took time.Duration) time.Duration {
			return policy.Rest{Least: r.cfg.Watching.Interval, Times: r.restTimes}.After(took)
		},
		Looked: func() { signal(r.wake.routes) }, // for changes without a notification
		Due:    func() { signal(r.wake.alerts) }, Failed: r.databaseError, Watched: r.cfg.Hooks.Watched,
	}
}

// lenient returns the destinations where a failed delivery does not block its ordering key.
func (r *Relay) lenient() (names []string) {
	for _, l := range r.lanes.list() {
		if d := l.current().Destination; d.OnFailure == policy.SkipFailed {
			names = append(names, d.Name)
		}
	}
	return names
}

// alive reports whether this relay is registered where it belongs.
func (r *Relay) alive() bool {
	_, alive := r.current()
	return alive
}

// alerter returns what sends alerts.
func (r *Relay) alerter() *alert.Sender {
	return &alert.Sender{
		DB: r.chores, Due: r.wake.alerts, Config: func() alert.Config { return r.config().Alerts },
		Alive:  r.alive,
		Always: identity.Unguarded, Log: r.cfg.Log, Notified: r.cfg.Hooks.Notified, Failed: r.databaseError,
	}
}

// prepare waits for the database and checks that it is fit.
func (r *Relay) prepare(ctx context.Context) error {
	failing := newBackoff()
	for {
		r.markTurn()
		err := r.session.Check(ctx)
		r.setDatabase(r.session.Database)
		switch {
		case errors.Is(err, pg.ErrSchema), errors.Is(err, pg.ErrPooler):
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
