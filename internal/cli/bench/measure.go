package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/measure"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/procstat"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay"
)

// measure runs the drain, the steady rate and the inserts.
func (b *bench) measure(ctx context.Context) (report Report, err error) {
	if b.load, err = startLoad(ctx, b.inv); err != nil {
		return report, err
	}
	defer func() { _ = b.load.Stop() }() // how it ends does not matter
	ready, err := b.order(ctx, "open", loadOrder{DSN: b.config.DirectURL(), Schema: b.schema, Payload: b.cmd.Payload})
	if err != nil {
		return report, err
	}
	if err := b.setDestination(ready.URL); err != nil {
		return report, err
	}
	report = Report{Database: b.config.DatabaseName(), Receiver: config.WithoutQuery(b.destination.URL), Payload: b.cmd.Payload}
	if b.cmd.URL == "" {
		report.Receiver = "this command's own, which answers 200"
	}
	if report.RoundTripMS, err = b.prepareDatabase(ctx); err != nil {
		return report, err
	}
	b.progress("inserting %s", plain.Plural(b.cmd.Events, "event", "events"))
	if _, err := b.order(ctx, "fill", loadOrder{Events: b.cmd.Events}); err != nil {
		return report, err
	}
	running, err := b.start(ctx)
	if err != nil {
		return report, err
	}
	stop := sync.OnceValue(running.stop)
	defer func() { err = errors.Join(err, stop()) }()
	if report.Drain, err = b.drain(ctx, running, report.RoundTripMS); err != nil {
		return report, err
	}
	if b.cmd.Rate > 0 {
		if report.Steady, err = b.steady(ctx, running); err != nil {
			return report, err
		}
	}
	if b.cmd.Inserts > 0 {
		report.Inserts, err = b.inserts(ctx, stop)
	}
	return report, err
}

// order has the other process do something.
func (b *bench) order(ctx context.Context, name string, order loadOrder) (answer loadAnswer, err error) {
	err = b.cause(ctx, b.load.Call(name, order, &answer))
	return answer, err
}

// cause returns why the run ended. After an interrupt the errors of the other process are noise.
func (b *bench) cause(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// setDestination sets where events go: the URL that was given, as the configuration has it, or the
// receiver of the load's process.
func (b *bench) setDestination(own string) error {
	if b.cmd.URL == "" {
		b.destination = relay.Destination{Name: config.DefaultDestination, URL: own}
		return nil
	}
	for _, d := range b.config.Relay.Destinations {
		if d.Name == config.DefaultDestination {
			b.destination = d
			return nil
		}
	}
	return errors.New("the configuration made no destination of --url")
}

const (
	selectBackend = `SELECT pg_backend_pid()`
	selectWAL     = `SELECT (CASE WHEN pg_is_in_recovery() THEN '0/0'::pg_lsn ELSE pg_current_wal_insert_lsn() END - '0/0')::float8`
	selectNothing = `SELECT 1`
	routeBench    = `INSERT INTO %s (pattern, destination) VALUES ('*', $1)`
)

// prepareDatabase routes the events, finds the server's process if it is on this machine, and
// returns the median of its round trips in milliseconds.
func (b *bench) prepareDatabase(ctx context.Context) (roundTrip float64, err error) {
	if _, err := b.pool.Exec(ctx, fmt.Sprintf(routeBench, pgx.Identifier{b.schema, "outbox_route"}.Sanitize()), config.DefaultDestination); err != nil {
		return 0, fmt.Errorf("route the events: %w", err)
	}
	var backend int
	if err := b.pool.QueryRow(ctx, selectBackend).Scan(&backend); err != nil {
		return 0, fmt.Errorf("find the server's process: %w", err)
	}
	if host := b.config.ConnConfig().Host; isLocal(host) {
		b.postmaster = procstat.Parent(backend, "postgres")
	}
	var times []float64
	for range 21 {
		begun := time.Now()
		if _, err := b.pool.Exec(ctx, selectNothing); err != nil {
			return 0, fmt.Errorf("measure a round trip: %w", err)
		}
		times = append(times, float64(time.Since(begun))/float64(time.Millisecond))
	}
	slices.Sort(times)
	return measure.Quantile(times, 0.5), nil
}

// isLocal reports whether a host is this machine: a directory of a socket, or loopback.
func isLocal(host string) bool {
	return len(host) > 0 && host[0] == '/' || slices.Contains([]string{"localhost", "127.0.0.1", "::1"}, host)
}

// usage is the processor time and the WAL that were used within a time.
type usage struct {
	window         time.Duration
	relay, server  time.Duration
	load           time.Duration // of the producers' process
	busy, capacity time.Duration // of the machine
	wal            float64
}

// during returns what is used while something is done.
func (b *bench) during(ctx context.Context, do func() error) (used usage, err error) {
	before, err := b.usage(ctx)
	begun := time.Now()
	if err == nil {
		err = do()
	}
	if err != nil {
		return used, err
	}
	after, err := b.usage(ctx)
	return usage{
		window: time.Since(begun), relay: after.relay - before.relay, server: after.server - before.server, load: after.load - before.load,
		busy: after.busy - before.busy, capacity: after.capacity - before.capacity, wal: after.wal - before.wal,
	}, err
}

// usage returns what was used up to now.
func (b *bench) usage(ctx context.Context) (u usage, err error) {
	if err := b.pool.QueryRow(ctx, selectWAL).Scan(&u.wal); err != nil {
		return u, fmt.Errorf("read the WAL's position: %w", err)
	}
	u.relay, u.load = procstat.Process(os.Getpid()), procstat.Process(b.load.PID())
	if b.postmaster > 0 {
		u.server = procstat.Family(b.postmaster)
	}
	u.busy, u.capacity = procstat.Machine()
	return u, nil
}

// leastCounted is the processor time from which on it is reported. The system counts it in steps of
// 10 ms: of less, a figure for each event would be an accident.
const leastCounted = 50 * time.Millisecond

// per divides processor time, in the unit. It returns nil where the time was not counted, or is too
// short to divide.
func per(used, unit time.Duration, by float64) *float64 {
	if used < leastCounted || by <= 0 {
		return nil
	}
	value := float64(used) / float64(unit) / by
	return &value
}

// A runningRelay is the relay that runs within this process, and what it reported.
type runningRelay struct {
	cancel context.CancelFunc
	ended  chan struct{}
	err    error // once ended is closed

	mu          sync.Mutex // guards what follows
	attempts    int
	inPosts     time.Duration
	first       time.Time
	last        time.Time
	failures    int                 // requests that did not deliver
	lastFailure string              // how the last of them failed
	answered    map[int64]time.Time // by event, delivered ones
	delivered   int                 // deliveries that the database knows to be delivered
	failed      int                 // deliveries that the relay never attempts again
	settled     chan struct{}       // of 1: one of the two has grown
}

func (b *bench) start(ctx context.Context) (*runningRelay, error) {
	running := &runningRelay{ended: make(chan struct{}), answered: map[int64]time.Time{}, settled: make(chan struct{}, 1)}
	cfg := relay.Config{
		Pool: b.config.Pool, Pooler: b.config.Relay.Pooler, Schema: b.schema, AllowSuperuser: true, Name: "outbox-relay bench", Version: b.inv.Version,
		Destinations: []relay.Destination{b.destination}, Hooks: relay.Hooks{Attempted: running.attempted, Settled: running.settle},
	}
	if b.cmd.URL != "" {
		cfg.Egress = b.config.Relay.Egress
	}
	r, err := relay.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("start relay: %w", err)
	}
	ctx, running.cancel = context.WithCancel(ctx)
	go func() {
		defer close(running.ended)
		running.err = r.Run(ctx)
	}()
	return running, nil
}

func (r *runningRelay) stop() error {
	r.cancel()
	<-r.ended
	return r.err
}

func (r *runningRelay) attempted(a relay.Attempt) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attempts++
	r.inPosts += a.Duration
	if r.first.IsZero() {
		r.first = now.Add(-a.Duration)
	}
	r.last = now
	if a.Outcome != policy.Delivered {
		r.failures++
		r.lastFailure = describeFailure(a)
		return
	}
	r.answered[a.EventID] = now
}

func (r *runningRelay) settle(_ string, outcome policy.Outcome, _ policy.Reason, deliveries int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch outcome {
	case policy.Delivered:
		r.delivered += deliveries
	case policy.Fail:
		r.failed += deliveries
	case policy.Retry, policy.Hold: // wait for another attempt
	}
	select {
	case r.settled <- struct{}{}:
	default:
	}
}

// state returns how many deliveries are delivered and failed so far. failures says how many
// requests failed, and how the last one did; it is empty if none has.
func (r *runningRelay) state() (delivered, failed int, failures string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failures > 0 {
		failures = fmt.Sprintf("%s failed, the last one %s", plain.Plural(r.failures, "request", "requests"), r.lastFailure)
	}
	return r.delivered, r.failed, failures
}

// deliveryTimeout is how long bench waits for the next delivery before it gives up.
const deliveryTimeout = 30 * time.Second

// wait returns when so many events have been delivered. It fails at once if the receiver refuses
// one for good, which then never arrives.
func (b *bench) wait(ctx context.Context, running *runningRelay, count int, phase string) error {
	report := time.NewTicker(time.Second)
	defer report.Stop()
	seen, since := 0, time.Now()
	for {
		n, failed, failures := running.state()
		if n >= count {
			return nil
		}
		if failed > 0 {
			return fmt.Errorf("the receiver refuses the events of this command for good: %s; let it accept the type bench.event with payloads like {\"pad\":\"xxx\"}", failures)
		}
		if n > seen {
			seen, since = n, time.Now()
		}
		if failures != "" {
			failures = "; " + failures
		}
		if time.Since(since) > deliveryTimeout {
			return fmt.Errorf("nothing was delivered for %s: %d of %s so far%s; check the receiver at %s", deliveryTimeout, n, plain.Plural(count, "event", "events"),
				failures, config.WithoutQuery(b.destination.URL))
		}
		select {
		case <-running.settled:
		case <-report.C:
			b.progress("%s: %d of %d delivered%s", phase, n, count, failures)
		case <-running.ended:
			return b.cause(ctx, errors.Join(errors.New("the relay ended"), running.err))
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (b *bench) drain(ctx context.Context, running *runningRelay, roundTrip float64) (d Drain, err error) {
	used, err := b.during(ctx, func() error { return b.wait(ctx, running, b.cmd.Events, "drain") })
	if err != nil {
		return d, err
	}
	running.mu.Lock()
	defer running.mu.Unlock()
	took := running.last.Sub(running.first)
	events := float64(b.cmd.Events)
	d = Drain{
		Events: b.cmd.Events, Attempts: running.attempts, Seconds: took.Seconds(), PerSecond: events / max(took.Seconds(), 1e-9),
		RelayMicros:    per(used.relay, time.Microsecond, events),
		PostgresMicros: per(used.server, time.Microsecond, events),
		WALBytes:       used.wal / events,
		InFlight:       running.inPosts.Seconds() / max(took.Seconds(), 1e-9),
		AnswerMS:       running.inPosts.Seconds() * 1000 / float64(max(running.attempts, 1)),
	}
	whole := b.destination.WithDefaults(relay.Egress{})
	d.Limit = limits{
		window: used.window, inFlight: d.InFlight, maxInFlight: min(whole.MaxInFlight, relay.DefaultMaxInFlight), answer: d.AnswerMS, roundTrip: roundTrip,
		rate: d.PerSecond, rateLimit: whole.RateLimit, failures: running.failures,
		busy: share(used.busy, used.capacity), relay: share(used.relay, used.window),
		server: share(used.server, used.window), load: share(used.load, used.window), processors: runtime.NumCPU(),
	}.String()
	return d, nil
}

func (b *bench) steady(ctx context.Context, running *runningRelay) (*Steady, error) {
	count := max(int(float64(b.cmd.Rate)*b.cmd.Duration.Seconds()), 1)
	b.progress("committing %d events/s for %s", b.cmd.Rate, b.cmd.Duration)
	var committed loadAnswer
	used, err := b.during(ctx, func() (err error) {
		committed, err = b.order(ctx, "steady", loadOrder{First: b.cmd.Events, Events: count, Rate: b.cmd.Rate, For: b.cmd.Duration})
		if err != nil {
			return err
		}
		count = len(committed.IDs) // fewer than were due, if the database is slower than the rate
		return b.wait(ctx, running, b.cmd.Events+count, "steady")
	})
	if err != nil {
		return nil, err
	}
	running.mu.Lock()
	defer running.mu.Unlock()
	var times []float64
	for i, id := range committed.IDs {
		times = append(times, max(0, float64(running.answered[id].UnixNano()-committed.Committed[i])/float64(time.Millisecond)))
	}
	slices.Sort(times)
	seconds := used.window.Seconds()
	inserting := float64(slices.Max(committed.Committed)-slices.Min(committed.Committed)) / float64(time.Second)
	return &Steady{
		Rate: b.cmd.Rate, Events: count, P50: measure.Quantile(times, 0.5), P90: measure.Quantile(times, 0.9), P99: measure.Quantile(times, 0.99), Max: measure.Quantile(times, 1),
		RelayMS:     per(used.relay, time.Millisecond, seconds),
		PostgresMS:  per(used.server, time.Millisecond, seconds),
		CommittedAt: float64(count) / (inserting + 1/float64(b.cmd.Rate)), // each event has its part of the time, the last one too
	}, nil
}

// inserts measures how fast producers can commit: beside the relay, and once stopRelay has ended
// it.
func (b *bench) inserts(ctx context.Context, stopRelay func() error) (*Inserts, error) {
	report := &Inserts{Clients: connections, Seconds: b.cmd.Inserts.Seconds()}
	first := maxEvents + maxRate*int(maxDuration.Seconds()) // beyond all numbers before
	measure := func() (rate InsertRate, err error) {
		var answer loadAnswer
		used, err := b.during(ctx, func() (err error) {
			answer, err = b.order(ctx, "insert", loadOrder{First: first, For: b.cmd.Inserts})
			return err
		})
		if err != nil {
			return rate, err
		}
		first += answer.Inserted
		n := float64(answer.Inserted)
		rate.PerSecond = n / used.window.Seconds()
		rate.PostgresMS = per(used.server, time.Millisecond, n)
		return rate, nil
	}
	b.progress("committing events as fast as the database answers, for %s beside the relay and for %[1]s without it", b.cmd.Inserts)
	var err error
	if report.Beside, err = measure(); err != nil {
		return nil, err
	}
	if err := stopRelay(); err != nil {
		return nil, err
	}
	report.Alone, err = measure()
	return report, err
}

func share(part, whole time.Duration) float64 {
	if whole <= 0 {
		return 0
	}
	return float64(part) / float64(whole)
}
