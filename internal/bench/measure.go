package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/measure"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A sample is what one measurement found, by the name of the metric.
type sample map[string]float64

// measurementTimeout is how long a measurement may take before it has failed.
const measurementTimeout = 15 * time.Minute

// drain measures how fast a system delivers what waits already, from the first arrival to the last.
func (r *rig) drain(ctx context.Context, s system, l load) (found sample, err error) {
	l = l.withDefaults()
	db, done, err := r.filled(ctx, s, l)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, done()) }()
	if l.holdVacuum {
		release, err := blockVacuum(ctx, db)
		if err != nil {
			return nil, err
		}
		defer release()
	}
	if err := r.receiver.Call("reset", l.events, nil); err != nil {
		return nil, err
	}
	var processes []*process
	defer func() { err = errors.Join(err, stopAll(processes)) }()
	var a arrivals
	used, err := r.during(ctx, db, &processes, func() (err error) {
		if processes, err = s.start(ctx, r, db, l); err != nil {
			return err
		}
		if err := r.receiver.Call("wait", waitArg{int64(l.events), measurementTimeout}, &a); err != nil {
			return err
		}
		if s.unsettled() != "" && l.dead == 0 && l.slow == 0 {
			return db.waitUntil(ctx, s.unsettled(), false, measurementTimeout)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	events := float64(l.events)
	tenth := func(n int) float64 { return float64(a.Tenths[n] - a.Tenths[n-1]) }
	found = sample{
		"rate":  (events - 1) / (float64(a.Tenths[10]-a.Tenths[0]) / 1e9),
		"again": float64(a.Requests - a.Distinct),
		// The first tenth has the start of the process in it, the second does not.
		"last": tenth(2) / tenth(10),
	}
	if db != nil {
		found = used.perEvent(found, events)
	}
	if len(processes) > 0 {
		found["process"] = float64(used.process.Microseconds()) / events
	}
	return found, nil
}

// filled returns a database with what a load has waiting, and what to do with it afterwards.
func (r *rig) filled(ctx context.Context, s system, l load) (db *database, done func() error, err error) {
	if _, isLoop := s.(loop); isLoop {
		return nil, func() error { return nil }, nil
	}
	name := "settled-" + strconv.Itoa(l.settled)
	if db = r.kept[name]; db == nil {
		if db, err = r.fresh(ctx); err != nil {
			return nil, nil, err
		}
		if err := s.prepare(ctx, r, db, l); err != nil {
			return nil, nil, errors.Join(err, r.drop(ctx, db))
		}
	}
	done = func() error { return r.drop(ctx, db) }
	if l.settled > 0 {
		r.kept[name] = db
		done = func() error { return nil }
	}
	r.databases++
	db.generation = fmt.Sprintf("%d-", r.databases)
	if err := s.fill(ctx, db, l, 0, l.events); err != nil {
		return nil, nil, errors.Join(err, done())
	}
	// Neither statistics nor hint bits are a system's to write.
	if err := db.exec(ctx, "VACUUM ANALYZE"); err != nil {
		return nil, nil, errors.Join(err, done())
	}
	return db, done, nil
}

// withProducer returns a database with the tables of a system and no events, a function that
// commits one event over one of so many connections, and what to do with both afterwards.
func (r *rig) withProducer(ctx context.Context, s system, l load, conns int) (db *database, produce func(context.Context, int) error, done func() error, err error) {
	if db, err = r.fresh(ctx); err != nil {
		return nil, nil, nil, err
	}
	var pool *pgxpool.Pool
	if err = s.prepare(ctx, r, db, l); err == nil {
		pool, err = openPool(ctx, db, conns)
	}
	if err == nil {
		produce, err = s.producer(pool, l)
	}
	done = func() error {
		if pool != nil {
			pool.Close()
		}
		return r.drop(ctx, db)
	}
	if err != nil {
		return nil, nil, nil, errors.Join(err, done())
	}
	return db, produce, done, nil
}

// blockVacuum holds a snapshot until it is released.
func blockVacuum(ctx context.Context, db *database) (release func(), err error) {
	conn, err := pgx.Connect(ctx, db.dsn)
	if err != nil {
		return nil, fmt.Errorf("block vacuum: %w", err)
	}
	if _, err := conn.Exec(ctx, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current()"); err != nil {
		return nil, errors.Join(fmt.Errorf("block vacuum: %w", err), conn.Close(ctx))
	}
	return func() { _ = conn.Close(context.WithoutCancel(ctx)) }, nil
}

// producers is how many connections the events of a latency measurement come over.
const producers = 8

// leastEvents is how many a latency is measured on at least, also at one event a second.
const leastEvents = 20

// latency measures the time from the commit of an event to its arrival, when events come at a
// steady rate. Each has its time, and is inserted then however late those before it are. burst are
// further events, in one go and halfway.
func (r *rig) latency(ctx context.Context, s system, l load, perSecond, burst int) (found sample, err error) {
	l = l.withDefaults()
	steady := max(perSecond*r.options.seconds, leastEvents)
	warm := min(perSecond, steady/10)
	l.events = 1 + warm + steady + burst
	db, produce, done, err := r.withProducer(ctx, s, l, producers)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, done()) }()
	processes, err := r.startWarm(ctx, s, db, l, produce)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stopAll(processes)) }()
	o := &openLoad{first: 1, count: warm + steady, perSecond: perSecond, produce: produce}
	if burst > 0 {
		o.halfway = func() error { return s.fill(ctx, db, l, 1+warm+steady, burst) }
	}
	used, err := r.during(ctx, db, &processes, func() error {
		if err := o.run(ctx); err != nil {
			return err
		}
		return r.receiver.Call("wait", waitArg{int64(l.events), measurementTimeout}, nil)
	})
	if err != nil {
		return nil, err
	}
	var a arrivals
	if err := r.receiver.Call("report", nil, &a); err != nil {
		return nil, err
	}
	found = o.quantiles(a.At, warm)
	found["server"] = used.server.Seconds() * 1000 / used.window.Seconds()
	found["process"] = used.process.Seconds() * 1000 / used.window.Seconds()
	if burst > 0 {
		found["burst"] = time.Duration(slices.Max(a.At[1+warm+steady:]) - o.burstAt.UnixNano()).Seconds()
	}
	return found, nil
}

// startWarm starts a system and returns when its first event, number 0, has arrived and it is idle
// again.
func (r *rig) startWarm(ctx context.Context, s system, db *database, l load, produce func(context.Context, int) error) ([]*process, error) {
	if err := r.receiver.Call("reset", l.events, nil); err != nil {
		return nil, err
	}
	processes, err := s.start(ctx, r, db, l)
	if err != nil {
		return nil, err
	}
	err = produce(ctx, 0)
	if err == nil {
		err = r.receiver.Call("wait", waitArg{1, time.Minute}, nil)
	}
	if err == nil {
		err = db.waitUntil(ctx, s.unsettled(), false, time.Minute)
	}
	if err != nil {
		return nil, errors.Join(err, stopAll(processes))
	}
	_ = sleep.For(ctx, time.Second)
	return processes, nil
}

func openPool(ctx context.Context, db *database, conns int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(db.dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns, config.MinConns = int32(conns), int32(conns)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open connections: %w", err)
	}
	return pool, nil
}

// An openLoad inserts events at the times that they are meant for.
type openLoad struct {
	first, count, perSecond int
	produce                 func(ctx context.Context, n int) error
	halfway                 func() error // nil: nothing happens then

	begun     time.Time
	committed []time.Time
	burstAt   time.Time
}

func (o *openLoad) run(ctx context.Context) (err error) {
	o.committed = make([]time.Time, o.count)
	var bursting sync.WaitGroup
	var failed error
	if o.halfway != nil {
		bursting.Go(func() {
			select {
			case <-time.After(time.Duration(o.count/2) * time.Second / time.Duration(o.perSecond)):
				o.burstAt = time.Now()
				failed = o.halfway()
			case <-ctx.Done():
			}
		})
	}
	o.begun, err = measure.Open(ctx, producers, o.count, o.perSecond, func(ctx context.Context, n int) error {
		err := o.produce(ctx, o.first+n)
		o.committed[n] = time.Now()
		return err
	})
	bursting.Wait()
	return errors.Join(err, failed)
}

// quantiles compares when the events behind the first warm ones arrived with when they were
// committed, and were meant to be.
func (o *openLoad) quantiles(at []int64, warm int) sample {
	var fromCommit, fromIntended []float64
	for n := warm; n < o.count; n++ {
		arrived := at[o.first+n]
		fromCommit = append(fromCommit, max(0, float64(arrived-o.committed[n].UnixNano())/1e6))
		fromIntended = append(fromIntended, float64(arrived-measure.DueAt(o.begun, n, o.perSecond).UnixNano())/1e6)
	}
	slices.Sort(fromCommit)
	slices.Sort(fromIntended)
	return sample{
		"p50": measure.Quantile(fromCommit, 0.5), "p90": measure.Quantile(fromCommit, 0.9), "p99": measure.Quantile(fromCommit, 0.99), "max": measure.Quantile(fromCommit, 1),
		"intended50": measure.Quantile(fromIntended, 0.5), "intended99": measure.Quantile(fromIntended, 0.99),
	}
}

// inserts measures how many events so many clients commit in a second, each in a transaction of its
// own.
func (r *rig) inserts(ctx context.Context, s system, clients int, running bool) (found sample, err error) {
	l := load{}.withDefaults()
	db, produce, done, err := r.withProducer(ctx, s, l, clients)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, done()) }()
	if running {
		l.events = 1
		processes, err := r.startWarm(ctx, s, db, l, produce)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, stopAll(processes)) }()
	}
	var n int
	used, err := r.during(ctx, db, new([]*process), func() (err error) {
		n, err = measure.Closed(ctx, clients, time.Duration(r.options.seconds)*time.Second, produce)
		return err
	})
	if err != nil {
		return nil, err
	}
	return used.perEvent(sample{"rate": float64(n) / used.window.Seconds()}, float64(n)), nil
}
