package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
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
	if err := r.receiver.call("reset", resetArg{l.events}, nil); err != nil {
		return nil, err
	}
	before, err := r.read(ctx, db, nil)
	if err != nil {
		return nil, err
	}
	processes, err := s.start(ctx, r, db, l)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stopAll(processes)) }()
	var a arrivals
	if err := r.receiver.call("wait", waitArg{int64(l.events), measurementTimeout}, &a); err != nil {
		return nil, err
	}
	if s.unsettled() != "" && l.dead == 0 && l.slow == 0 {
		if err := db.waitUntil(ctx, s.unsettled(), false, measurementTimeout); err != nil {
			return nil, err
		}
	}
	after, err := r.read(ctx, db, processes)
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
		found["server"] = float64((after.server - before.server).Microseconds()) / events
		found["wal"] = float64(after.walBytes-before.walBytes) / events
	}
	if len(processes) > 0 {
		found["process"] = float64(after.process.Microseconds()) / events
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

// withProducer returns a database with the tables of a system and no events, a function that commits one event over one of so many
// connections, and what to do with both afterwards.
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

// latency measures the time from the commit of an event to its arrival, when events come at a steady rate. Each has its time,
// and is inserted then however late those before it are. burst are further events, in one go and halfway.
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
	before, err := r.read(ctx, db, processes)
	if err != nil {
		return nil, err
	}
	o := &openLoad{first: 1, count: warm + steady, perSecond: perSecond, produce: produce}
	if burst > 0 {
		o.halfway = func() error { return s.fill(ctx, db, l, 1+warm+steady, burst) }
	}
	if err := o.run(ctx); err != nil {
		return nil, err
	}
	if err := r.receiver.call("wait", waitArg{int64(l.events), measurementTimeout}, nil); err != nil {
		return nil, err
	}
	after, err := r.read(ctx, db, processes)
	if err != nil {
		return nil, err
	}
	var a arrivals
	if err := r.receiver.call("report", nil, &a); err != nil {
		return nil, err
	}
	seconds := after.at.Sub(before.at).Seconds()
	found = o.quantiles(a.At, warm)
	found["server"] = (after.server - before.server).Seconds() * 1000 / seconds
	found["process"] = (after.process - before.process).Seconds() * 1000 / seconds
	if burst > 0 {
		found["burst"] = time.Duration(slices.Max(a.At[1+warm+steady:]) - o.burstAt.UnixNano()).Seconds()
	}
	return found, nil
}

// startWarm starts a system and returns when its first event, number 0, has arrived and it is idle again.
func (r *rig) startWarm(ctx context.Context, s system, db *database, l load, produce func(context.Context, int) error) ([]*process, error) {
	if err := r.receiver.call("reset", resetArg{l.events}, nil); err != nil {
		return nil, err
	}
	processes, err := s.start(ctx, r, db, l)
	if err != nil {
		return nil, err
	}
	err = produce(ctx, 0)
	if err == nil {
		err = r.receiver.call("wait", waitArg{1, time.Minute}, nil)
	}
	if err == nil {
		err = db.waitUntil(ctx, s.unsettled(), false, time.Minute)
	}
	if err != nil {
		return nil, errors.Join(err, stopAll(processes))
	}
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
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

	intended, committed []time.Time
	burstAt             time.Time
}

func (o *openLoad) run(ctx context.Context) error {
	o.intended, o.committed = make([]time.Time, o.count), make([]time.Time, o.count)
	due := make(chan int, o.count)
	failures := make([]error, producers+2) // the last two are those of the burst and of an interrupt
	var working sync.WaitGroup
	for worker := range producers {
		working.Go(func() {
			for n := range due {
				if err := o.produce(ctx, o.first+n); err != nil {
					failures[worker] = err
					continue
				}
				o.committed[n] = time.Now()
			}
		})
	}
	begun := time.Now()
	for n := range o.count {
		o.intended[n] = begun.Add(time.Duration(n) * time.Second / time.Duration(o.perSecond))
		if wait := time.Until(o.intended[n]); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
			}
		}
		due <- n
		if n == o.count/2 && o.halfway != nil {
			working.Go(func() {
				o.burstAt = time.Now()
				failures[producers] = o.halfway()
			})
		}
	}
	close(due)
	working.Wait()
	failures[producers+1] = ctx.Err()
	return errors.Join(failures...)
}

// quantiles compares when the events behind the first warm ones arrived with when they were committed, and were meant to be.
func (o *openLoad) quantiles(at []int64, warm int) sample {
	var fromCommit, fromIntended []float64
	for n := warm; n < o.count; n++ {
		arrived := at[o.first+n]
		fromCommit = append(fromCommit, max(0, float64(arrived-o.committed[n].UnixNano())/1e6))
		fromIntended = append(fromIntended, float64(arrived-o.intended[n].UnixNano())/1e6)
	}
	slices.Sort(fromCommit)
	slices.Sort(fromIntended)
	return sample{
		"p50": quantile(fromCommit, 0.5), "p90": quantile(fromCommit, 0.9), "p99": quantile(fromCommit, 0.99), "max": quantile(fromCommit, 1),
		"intended50": quantile(fromIntended, 0.5), "intended99": quantile(fromIntended, 0.99),
	}
}

func quantile(sorted []float64, q float64) float64 { return sorted[int(q*float64(len(sorted)-1)+0.5)] }

// inserts measures how many events so many clients commit in a second, each in a transaction of its own.
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
	before, err := r.read(ctx, db, nil)
	if err != nil {
		return nil, err
	}
	n, err := closedLoad(ctx, clients, time.Duration(r.options.seconds)*time.Second, produce)
	if err != nil {
		return nil, err
	}
	after, err := r.read(ctx, db, nil)
	if err != nil {
		return nil, err
	}
	events := float64(n)
	return sample{
		"rate":   events / after.at.Sub(before.at).Seconds(),
		"server": float64((after.server - before.server).Microseconds()) / events,
		"wal":    float64(after.walBytes-before.walBytes) / events,
	}, nil
}

// closedLoad lets each client insert one event after the other, and returns how many they were.
func closedLoad(ctx context.Context, clients int, duration time.Duration, produce func(context.Context, int) error) (int64, error) {
	deadline := time.Now().Add(duration)
	var next, done atomic.Int64
	failures := make([]error, clients)
	var working sync.WaitGroup
	for client := range clients {
		working.Go(func() {
			for time.Now().Before(deadline) {
				if failures[client] = produce(ctx, int(next.Add(1))); failures[client] != nil {
					return
				}
				done.Add(1)
			}
		})
	}
	working.Wait()
	return done.Load(), errors.Join(failures...)
}
