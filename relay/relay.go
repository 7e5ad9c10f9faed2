package relay

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/breaker"
	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/join"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/routes"
	"github.com/outbox-relay/outbox-relay/internal/relay/send"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relay/take"
	"github.com/outbox-relay/outbox-relay/internal/relay/waiting"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A Relay claims, delivers and settles. Make one with [New]; run it once.
type Relay struct {
	cfg     Config // what a reload cannot change; the rest of it is empty
	reloads reloads

	presence  session.Presence
	effective atomic.Pointer[Config]
	lanes     *lane.Lanes
	store     *store
	producers session.Producers
	mailbox   *mailbox
	signals   *signals
	hands     take.Hands
	progress
	archiving atomic.Bool
	trouble   alert.Trouble // of the database, as this relay sees it
	errorLog  errorLog
	phases    send.Phases

	chores  pg.Pool // for what is done beside delivering: one statement at a time
	session *session.Session
	settler *settle.Settler
	senders *send.Senders
	watcher *watch.Watcher
	waiting *waiting.Keeper

	restFactor int // agenda.RestFactor; less in tests, where a busy machine would make the rests last for minutes

	// databaseBusy says why the database needs to be left alone for now; nil: never.
	databaseBusy func() (reason string, busy bool)

	aborted context.Context // done after Abort
	abort   context.CancelFunc
	fail    context.CancelCauseFunc // ends Run for what waiting cannot fix
}

// settleGrace is how long the last outcomes may take to be written once everything else has ended.
// Leaving takes less than a second after it, so that a stop takes five seconds longer than
// DrainTimeout at most. Statements that are not part of delivering are cut off then, too.
const (
	settleGrace = 4 * time.Second
	cutAfter    = 500 * time.Millisecond
)

// New returns a Relay, or every mistake in its configuration as joined [Problem]s. It does not
// touch the network.
func New(cfg Config) (*Relay, error) {
	cfg, err := complete(cfg)
	if err != nil {
		return nil, err
	}
	r := &Relay{
		cfg: cfg.fixed(), store: &store{}, mailbox: newMailbox(), signals: newSignals(), waiting: waiting.NewKeeper(), restFactor: agenda.RestFactor,
	}
	r.effective.Store(&cfg)
	r.lanes = lane.New(func(d post.Destination) (*post.Endpoint, error) {
		e, err := post.NewEndpoint(d, cfg.Version)
		if err == nil {
			e.Log = cfg.Log
		}
		return e, err
	})
	if err := r.lanes.Set(time.Now(), cfg.Destinations, nil); err != nil {
		return nil, err
	}
	r.settler = r.newSettler()
	r.senders = &send.Senders{
		Phases: &r.phases, Lanes: r.lanes, Settle: r.settler.Settle, Post: r.mailbox.post, Retry: r.mailbox.retries.Add, Failed: r.databaseError,
		Log: cfg.Log, Poll: cfg.PollInterval, Spans: cfg.Spans, History: cfg.History, Attempted: cfg.Hooks.Attempted,
		LogDelivered: func() bool { return r.config().LogDelivered },
		Alive:        func() bool { _, alive := r.current(); return alive },
	}
	r.reloads.keeper = routes.Keeper{
		Name: cfg.Name, Log: cfg.Log, Added: func() { signal(r.signals.parked) }, Failed: r.databaseError,
	}
	r.session = r.newSession()
	r.watcher = r.newWatcher()
	r.waiting.Lenient, r.waiting.Failed = r.lenient, r.databaseError
	r.waiting.Released = func() { r.mailbox.post(agenda.CauseSweep) }
	r.presence.Set(cfg.Resume, false)
	r.databaseBusy = func() (string, bool) { reason := r.watcher.Pressure(); return reason, reason != "" }
	r.aborted, r.abort = context.WithCancel(context.Background())
	r.trouble.Database = r.guardConfig().Address
	return r, nil
}

func (r *Relay) guardConfig() identity.Config {
	cfg := identity.Config{
		Name: r.cfg.Name, Version: r.cfg.Version, Environment: r.cfg.Environment,
		Interval: identity.DefaultInterval, Grace: identity.DefaultGrace, Unnoticed: identity.DefaultUnnoticed, AlertEvery: alert.Retry,
		Log: r.cfg.Log, Quarantined: r.cfg.Hooks.Quarantined, Failed: r.databaseError,
		Alert: func() { signal(r.signals.alerts) }, Disown: func() { r.presence.Set(0, false) },
	}
	if conn := r.cfg.Pool.ConnConfig; conn != nil {
		cfg.Address = identity.Address(conn)
	}
	return cfg
}

// What Run ends with. The wrapping error says what to do.
var (
	ErrSchema    = pg.ErrSchema    // the database's schema is not the one that this build works with
	ErrPooler    = pg.ErrPooler    // the database URL leads through a pooler that does not keep sessions, and Config does not say so
	ErrEncoding  = pg.ErrEncoding  // the database is not in UTF-8
	ErrSuperuser = pg.ErrSuperuser // the login is a superuser's beside others, and Config.AllowSuperuser is not set
)

// Run works until ctx is done. Then it stops claiming, gives back what it has not sent, lets POSTs
// in flight end within DrainTimeout, settles them, deregisters, and returns nil, also from a
// database that does not answer, at most five seconds after DrainTimeout. While the database is
// away it waits for it, for ever. It returns an error only for what waiting cannot fix, one
// wrapping [ErrSchema], [ErrPooler], [ErrEncoding] or [ErrSuperuser], and [Asleep].
func (r *Relay) Run(ctx context.Context) error {
	r.reloads.begin(ctx)
	if err := r.session.Open(ctx); err != nil {
		return err
	}
	r.setDatabase(r.session.Database)
	defer func() { r.session.Database.Close() }()
	if err := r.prepare(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	ctx, r.fail = context.WithCancelCause(ctx)
	defer r.fail(nil)

	r.session.Guard.Shut()
	w := r.begin(ctx)
	<-ctx.Done()
	cause := context.Cause(ctx)
	r.end(w, isAsleep(cause))
	r.cfg.Log.Info().Msg("stopped")
	if isAsleep(cause) || errors.Is(cause, ErrSchema) {
		return cause
	}
	return nil
}

// work holds the goroutines of Run by the order in which they end, and the functions that end them.
type work struct {
	takers, settler, presence sync.WaitGroup

	cutOff context.CancelFunc      // ends POSTs
	giveUp context.CancelFunc      // ends settling
	leave  context.CancelCauseFunc // ends the session, by which other relays see that this one lives
}

// begin starts everything, which takes and sends until ctx is done, and then is ended by
// [Relay.end].
func (r *Relay) begin(ctx context.Context) *work {
	lasting := context.WithoutCancel(ctx)
	doing, cutOff := context.WithCancel(lasting)
	settling, giveUp := context.WithCancel(lasting)
	present, leave := context.WithCancelCause(lasting)
	r.phases = send.Phases{Taking: ctx, Doing: doing, Settling: settling}
	w := &work{cutOff: cutOff, giveUp: giveUp, leave: leave}

	w.presence.Go(func() { r.session.Run(present) })
	w.settler.Go(func() { r.settler.Run(settling) })
	w.takers.Go(func() {
		r.newClaimer().run(ctx)
		if !isAsleep(context.Cause(ctx)) {
			r.withdrawRoutes() // not before: each range that it took is to keep them
		}
	})
	w.takers.Go(func() { r.maintain(ctx) })
	w.takers.Go(func() { r.alerter().Run(ctx) })
	w.takers.Go(func() { r.watcher.Run(ctx) })
	r.waiting.Sweep() // what another relay left
	w.takers.Go(func() { r.waiting.Run(ctx) })
	w.takers.Go(func() {
		(&post.Readiness{Endpoints: func() []*post.Endpoint { return r.lanes.Logs(r.config().Destinations) }, Log: r.config().Log}).Run(ctx)
	})
	return w
}

// end ends what has begun: first what takes, then what sends, then what settles, and last the
// session. Each has its time, and is cut off after it.
func (r *Relay) end(w *work, asleep bool) {
	drainTimeout := r.config().DrainTimeout
	r.cfg.Log.Info().Dur("drain_timeout", drainTimeout).Bool("asleep", asleep).Msg("stopping")
	defer w.leave(nil)
	defer w.cutOff()
	defer w.giveUp()
	defer context.AfterFunc(r.phases.Settling, func() { time.AfterFunc(cutAfter, r.session.Database.Cut) })()
	drain := time.AfterFunc(drainTimeout, w.cutOff)
	defer drain.Stop()
	defer context.AfterFunc(r.aborted, w.cutOff)()
	// Once POSTs are cut off, only the database can hold things up, and it may be away.
	defer context.AfterFunc(r.phases.Doing, func() { time.AfterFunc(settleGrace, w.giveUp) })()

	w.takers.Wait()
	r.senders.GiveBackUnsent(policy.ReasonShutdown)
	r.senders.Wait()
	r.settler.Close()
	last := time.AfterFunc(settleGrace, w.giveUp)
	defer last.Stop()
	w.settler.Wait()
	r.writeHistory(r.phases.Settling)
	if r.phases.Settling.Err() != nil {
		w.leave(session.ErrSilent)
	}
	if asleep {
		w.leave(session.ErrAsleep)
	}
	w.leave(nil)
	w.presence.Wait()
	for _, l := range r.lanes.All() {
		l.Current().Retire()
	}
}

// Abort ends the drain of a Run that is told to stop, at once or when that happens: POSTs in flight
// are cut off, and attempted again later. It may be called at any time, from any goroutine.
func (r *Relay) Abort() { r.abort() }

// config returns the configuration in effect, which is never changed, only replaced.
func (r *Relay) config() *Config { return r.effective.Load() }

// current returns the number under which this relay claims, and whether it counts as alive.
func (r *Relay) current() (relayID int32, alive bool) { return r.presence.Current() }

// databaseError logs a failed statement that will be repeated.
func (r *Relay) databaseError(operation string, err error) {
	if errors.Is(err, identity.ErrGuarded) || errors.Is(err, identity.ErrQuarantined) {
		return // the guard logs it
	}
	if errors.Is(err, context.Canceled) && r.phases.Taking != nil && r.phases.Taking.Err() != nil {
		return // cut off by the stop
	}
	if again, tell := r.errorLog.tell(operation, err.Error(), time.Now()); tell {
		line := r.cfg.Log.Error().Err(err).Str("operation", operation)
		if hint := pg.Hint(err); hint != "" {
			line = line.Str("hint", hint)
		}
		if again > 0 {
			line = line.Int("times_since", again)
		}
		line.Msg("database: will be tried again")
	}
	r.trouble.Failed(time.Now(), err)
	if pg.SchemaMayDiffer(err) {
		signal(r.signals.schema)
	}
	if pg.HasCode(err, pg.ReadOnlyTransaction) || errors.Is(err, pg.ErrReadOnly) {
		// After a failover these connections may lead to what was the primary, for ever; new ones
		// need not.
		r.store.direct.Reset()
	}
	if hook := r.cfg.Hooks.DatabaseError; hook != nil {
		hook(operation, err)
	}
}

// newBackoff returns the pauses between repetitions of a statement. It never gives up.
func newBackoff() *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond),
		backoff.WithMaxInterval(5*time.Second),
		backoff.WithMaxElapsedTime(0),
	)
}

// setDatabase gives every part what it runs its statements on.
func (r *Relay) setDatabase(db session.Database) {
	r.session.Database = db
	r.store.direct, r.store.pool, r.settler.DB, r.senders.DB = db.Direct, db.Pool, db.Pool, db.Pool
	r.chores = pg.NewChores(db.Pool)
	r.watcher.DB, r.reloads.keeper.DB, r.waiting.DB = r.chores, db.Pool, r.chores
}

// newClaimer returns what claims.
func (r *Relay) newClaimer() *claimer {
	cfg, hooks, db := r.cfg, r.cfg.Hooks, r.store.pool
	maxInFlight := func() int { return r.config().MaxInFlight }
	c := &claimer{
		progress: &r.progress, presence: &r.presence, mailbox: r.mailbox, db: db, producers: &r.producers, log: cfg.Log,
		pollInterval: cfg.PollInterval, woken: hooks.Woken, idle: hooks.Idle, failed: r.databaseError, markClaims: r.markClaims,
		pace: agenda.Pace{Poll: cfg.PollInterval}, lanes: r.lanes,
	}
	c.breakers = breakerKeeper{
		lanes: r.lanes, store: r.store, agenda: &c.agenda, settling: r.phases.Settling, databaseError: r.databaseError,
		Keeper: breaker.Keeper{DB: db, Log: cfg.Log, Poll: cfg.PollInterval, Due: func() { signal(r.signals.alerts) }},
	}
	c.joins = join.Keys{DB: db, Lanes: r.lanes, Agenda: &c.agenda, Failed: r.databaseError}
	c.taker = take.Taker{
		DB: db, Log: cfg.Log, Lease: cfg.Lease, PollInterval: cfg.PollInterval, MaxInFlight: maxInFlight,
		Lanes: r.lanes, Hands: &r.hands, Agenda: &c.agenda, Pace: &c.pace, Clock: &c.clock, Joins: &c.joins, Settler: r.settler,
		Start: r.senders.Start, Spread: c.rows.NoteRange, Reparked: func() { signal(r.signals.reparked) }, Failed: r.databaseError,
		Handed: hooks.Claimed, Ran: hooks.ClaimRan,
	}
	c.rows = claim.Rows{
		DB: db, Lease: cfg.Lease, PollInterval: cfg.PollInterval, MaxInFlight: maxInFlight, RestFactor: r.restFactor,
		Lanes: r.lanes, Agenda: &c.agenda, Pace: &c.pace, Clock: &c.clock, Joins: &c.joins, Settler: r.settler, Waiting: r.waiting,
		Start: r.senders.Start, LaneChanged: hooks.LaneChanged, Handed: hooks.Claimed, Ran: hooks.ClaimRan, Failed: r.databaseError,
	}
	c.agenda.At(agenda.CauseEntry, time.Time{})
	return c
}

// newWatcher returns what looks around the database.
func (r *Relay) newWatcher() *watch.Watcher {
	return &watch.Watcher{
		Config: func() watch.Config { return r.cfg.Watching }, Alerts: func() alert.Config { return r.config().Alerts },
		Lenient: r.lenient, Learnt: r.learnt, Alive: r.alive,
		// However long a blocked vacuum makes it: like sweeps, it may take a hundredth of the time.
		Rest: func(least, took time.Duration) time.Duration {
			return agenda.Rest{Least: least, Times: r.restFactor}.After(took)
		},
		ArchiveDue: func(last time.Time) time.Time { return r.config().Retention.Overdue(last) },
		Looked:     func() { signal(r.signals.routes) }, // for changes without a notification
		Due:        func() { signal(r.signals.alerts) }, Failed: r.databaseError, Watched: r.cfg.Hooks.Watched,
	}
}

// lenient returns the destinations where a failed delivery does not block its ordering key.
func (r *Relay) lenient() (names []string) {
	for _, d := range r.config().Destinations {
		if d.OnFailure == policy.SkipFailed {
			names = append(names, d.Name)
		}
	}
	return names
}

// learnt returns the destinations that get fewer requests at once than they may, as flow control
// has found.
func (r *Relay) learnt() map[string]watch.Learnt {
	all := map[string]watch.Learnt{}
	for _, l := range r.lanes.List() {
		if atOnce, most := l.Learnt(); atOnce < most {
			all[l.Name] = watch.Learnt{Relay: r.cfg.Name, AtOnce: atOnce, Configured: most}
		}
	}
	return all
}

// alive reports whether this relay is registered where it belongs.
func (r *Relay) alive() bool {
	_, alive := r.current()
	return alive
}

// alerter returns what sends alerts.
func (r *Relay) alerter() *alert.Sender {
	return &alert.Sender{
		DB: r.chores, Due: r.signals.alerts, Config: func() alert.Config { return r.config().Alerts },
		Alive:  r.alive,
		Always: identity.Unguarded, Log: r.cfg.Log, Notified: r.cfg.Hooks.Notified, Failed: r.databaseError,
		Refresh: r.watcher.Refresh, Trouble: &r.trouble, Entry: r.cfg.Entry, Environment: r.cfg.Environment, Relay: r.cfg.Name,
	}
}

// prepare waits for the database and checks that it is fit. That it is away is told meanwhile.
func (r *Relay) prepare(ctx context.Context) error {
	alerts := r.alerter()
	alerts.Due = nil
	telling, told := context.WithCancel(ctx)
	var teller sync.WaitGroup
	teller.Go(func() { alerts.Run(telling) })
	defer teller.Wait()
	defer told()
	failing := newBackoff()
	for {
		r.markTurn()
		err := r.session.Check(ctx)
		r.setDatabase(r.session.Database)
		switch {
		case errors.Is(err, ErrSchema), errors.Is(err, ErrPooler), errors.Is(err, ErrEncoding), errors.Is(err, ErrSuperuser):
			return err
		case err == nil, ctx.Err() != nil:
			return nil
		}
		r.databaseError("prepare", err)
		if sleep.For(ctx, failing.NextBackOff()) != nil {
			return nil
		}
	}
}
