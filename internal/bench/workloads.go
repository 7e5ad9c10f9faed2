package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// The systems, as the tables name them.
const (
	nameOurs     = "outbox-relay"
	nameTuned    = "River, tuned"
	nameRiver    = "River"
	nameTextbook = "textbook outbox"
	nameLoop     = "bare loop"
	nameUnsigned = "bare loop, unsigned, in the receiver's process"
	nameBare     = "bare table"
	nameOther    = "outbox-relay, the other build"
)

// drainMetrics are those of every drain.
var drainMetrics = []metric{
	{"rate", "events/s", 0},
	{"process", "its CPU, µs an event", 1},
	{"server", "PostgreSQL's CPU, µs an event", 1},
	{"wal", "WAL, B an event", 0},
	{"again", "sent again", 0},
}

// drainRatios compare a drain with the requests alone, and with River.
var drainRatios = []ratio{
	{heading: "beside the bare loop", metric: "rate", toSystem: nameLoop}, {heading: "beside River, tuned", metric: "rate", toSystem: nameTuned},
}

// workloads is the table of all workloads, in the order of the report.
func workloads(o options) []workload {
	all := []workload{
		drainWorkload(o), latencyWorkload(o), insertWorkload(o), pipelineWorkload(), settledWorkload(o), vacuumWorkload(o), besideWorkload(o),
		orderedWorkload(o), burstWorkload(o), relaysWorkload(o), distanceWorkload(o), payloadWorkload(o), wireWorkload(o),
	}
	for i := range all {
		if cases := all[i].cases; o.quick { // the last one has most to it
			all[i].cases = cases[len(cases)-1:]
		}
	}
	return all
}

// draining is an entrant that drains a load.
func draining(name string, s system, l load) entrant {
	return entrant{name, func(ctx context.Context, r *rig) (sample, error) { return r.drain(ctx, s, l) }}
}

func drainWorkload(o options) workload {
	w := workload{
		name: "drain", title: "Drain what waits",
		about: fmt.Sprintf("%d events of 300 bytes wait; counted from the first arrival to the last. %d requests at most are under way in every system "+
			"but River without tuning (%d workers, as its documentation has it; it is given a tenth of the events) and the textbook outbox (a batch of %d). "+
			"All sign their requests.",
			o.events, inFlight, riverWorkers, textbookBatch),
		metrics: drainMetrics,
		ratios:  drainRatios,
	}
	for _, c := range []load{{destinations: 1}, {destinations: 50}, {destinations: 1, delay: 10 * time.Millisecond}, {destinations: 50, delay: 10 * time.Millisecond}} {
		c.events = o.events
		name := fmt.Sprintf("%s, answers after %s", plain.Plural(c.destinations, "destination", "destinations"), c.delay)
		direct, tenth := c, c
		direct.direct = true
		tenth.events = max(c.events/10, 10) // it waits most of the time
		w.cases = append(w.cases, testCase{name, []entrant{
			draining(nameOurs, ours{}, c), draining(nameTuned, riverQueue{tuned: true}, c), draining(nameRiver, riverQueue{}, tenth),
			draining(nameTextbook, textbook{}, c), draining(nameLoop, loop{signed: true}, c), draining(nameUnsigned, loop{}, direct),
		}})
	}
	return w
}

// rates are those of the latency workload, in events a second.
var rates = []int{1, 20, 200, 1000, 4000}

func latencyWorkload(o options) workload {
	w := workload{
		name: "latency", title: "From commit to arrival",
		about: fmt.Sprintf("Events come at a steady rate for %d s, each in its own transaction over %d connections. p50 to max are milliseconds from "+
			"the commit to the arrival; the next two from the moment the event was meant for, its insert included.", o.seconds, producers),
		metrics: []metric{
			{"p50", "p50, ms", 1},
			{"p90", "p90, ms", 1},
			{"p99", "p99, ms", 1},
			{"max", "max, ms", 1},
			{"intended50", "p50 as meant, ms", 1},
			{"intended99", "p99 as meant, ms", 1},
			{"server", "PostgreSQL's CPU, ms/s", 0},
			{"process", "its CPU, ms/s", 0},
		},
		ratios: []ratio{{heading: "p99 beside River, tuned", metric: "p99", toSystem: nameTuned}},
	}
	for _, perSecond := range rates {
		c := testCase{name: strconv.Itoa(perSecond) + "/s"}
		for _, s := range []struct {
			name string
			system
		}{{nameOurs, ours{}}, {nameTuned, riverQueue{tuned: true}}, {nameRiver, riverQueue{}}, {nameTextbook, textbook{}}} {
			c.entrants = append(c.entrants, entrant{s.name, func(ctx context.Context, r *rig) (sample, error) {
				return r.latency(ctx, s.system, load{}, perSecond, 0)
			}})
		}
		w.cases = append(w.cases, c)
	}
	return w
}

// clients are those of the insert workload.
var clients = []int{1, 16, 64}

// The systems of the insert workload beside those above.
const (
	nameStopped = "outbox-relay, stopped"
	nameRunning = "outbox-relay, running"
)

func insertWorkload(o options) workload {
	w := workload{
		name: "insert", title: "What a producer notices",
		about: fmt.Sprintf("So many clients insert one event after the other for %d s, each in its own transaction. The bare table has the same "+
			"columns and a unique key. River inserts by its own client, without a unique key, and its workers are stopped.", o.seconds),
		metrics: []metric{{"rate", "inserts/s", 0}, {"server", "PostgreSQL's CPU, µs an insert", 0}, {"wal", "WAL, B an insert", 0}},
		ratios:  []ratio{{heading: "beside the bare table", metric: "rate", toSystem: nameBare}},
	}
	for _, n := range clients {
		inserting := func(name string, s system, running bool) entrant {
			return entrant{name, func(ctx context.Context, r *rig) (sample, error) { return r.inserts(ctx, s, n, running) }}
		}
		w.cases = append(w.cases, testCase{plain.Plural(n, "client", "clients"), []entrant{
			inserting(nameBare, bareTable{}, false), inserting(nameStopped, ours{}, false), inserting(nameRunning, ours{}, true),
			inserting(nameRiver, riverQueue{}, false),
		}})
	}
	return w
}

func pipelineWorkload() workload {
	inserting := func(name string, s system, sql string) entrant {
		return entrant{name, func(ctx context.Context, r *rig) (sample, error) { return r.pipelined(ctx, s, sql) }}
	}
	return workload{
		name: "pipelined", title: "What one insert takes the server",
		about:   "20,000 inserts in transactions of 1,000, sent without waiting for the answer of each.",
		metrics: []metric{{"took", "µs an insert", 1}, {"server", "PostgreSQL's CPU, µs", 1}, {"wal", "WAL, B an insert", 0}},
		ratios:  []ratio{{heading: "beside the bare table", metric: "took", toSystem: nameBare}},
		cases: []testCase{{"1 connection", []entrant{
			inserting(nameBare, bareTable{}, insertBare), inserting(nameTextbook, textbook{}, insertTextbook), inserting(nameOurs, ours{}, insertOutbox),
		}}},
	}
}

// A variant is a load by its name.
type variant struct {
	name string
	load load
}

// variants is a workload that drains several loads by outbox-relay alone, each beside the first.
func variants(name, title, about string, all ...variant) workload {
	w := workload{
		name: name, title: title, about: about, metrics: drainMetrics,
		ratios: []ratio{{heading: "beside " + all[0].name, metric: "rate", toCase: all[0].name}},
	}
	for _, v := range all {
		w.cases = append(w.cases, testCase{v.name, []entrant{draining(nameOurs, ours{}, v.load)}})
	}
	return w
}

func settledWorkload(o options) workload {
	all := []variant{{"no settled events", load{events: o.events}}}
	for _, settled := range []int{o.settled, 4 * o.settled} {
		all = append(all, variant{fmt.Sprintf("%.3g million settled events", float64(settled)/1e6), load{events: o.events, settled: settled}})
		if o.settled <= 5_000_000 && !o.quick { // 20 million take some 20 GB, and have to be asked for
			break
		}
	}
	return variants("settled", "After many settled events",
		"The cost of an event must not grow with history. A database is filled once and serves every round.", all...)
}

func vacuumWorkload(o options) workload {
	w := variants("vacuum", "While a session blocks vacuum",
		fmt.Sprintf("%d events; a transaction that began before them stays open. The last column compares the last tenth with the second.", 5*o.events),
		variant{"vacuum works", load{events: 5 * o.events}}, variant{"vacuum blocked", load{events: 5 * o.events, holdVacuum: true}})
	w.metrics = append(w.metrics[:len(w.metrics):len(w.metrics)], metric{"last", "last tenth beside the second", 2})
	return w
}

func besideWorkload(o options) workload {
	return variants("beside", "Healthy destinations beside a dead and a slow one",
		fmt.Sprintf("49 destinations; as many events wait for one more, where nothing listens, or which answers after %s. Counted are the healthy ones.", slowAnswer),
		variant{"healthy alone", load{events: o.events, destinations: 49}},
		variant{"beside a dead one", load{events: o.events, destinations: 49, dead: o.events}},
		variant{"beside a slow one", load{events: o.events, destinations: 49, slow: o.events}})
}

func orderedWorkload(o options) workload {
	return variants("ordered", "Ordering keys", "10,000 keys, 100, and none.", variant{"no keys", load{events: o.events}},
		variant{"10,000 keys", load{events: o.events, keys: 10_000}}, variant{"100 keys", load{events: o.events, keys: 100}})
}

func relaysWorkload(o options) workload {
	all := []variant{{"1 relay", load{events: o.events}}}
	for _, relays := range []int{2, 4} {
		for _, each := range []int{inFlight / relays, inFlight} {
			all = append(all, variant{
				fmt.Sprintf("%d relays, %d requests in flight each", relays, each), load{events: o.events, relays: relays, inFlight: each},
			})
		}
	}
	return variants("relays", "Several relays on the same processors",
		fmt.Sprintf("Relays beside each other share the processors of one machine. One alone has %d requests in flight.", inFlight), all...)
}

func distanceWorkload(o options) workload {
	// All of them go through the link, so that its own cost cancels out.
	return variants("distance", "A distant database", "Every round trip between relay and database takes longer by this.",
		variant{"+0 ms", load{events: o.events, distance: time.Nanosecond}}, variant{"+1 ms", load{events: o.events, distance: time.Millisecond}},
		variant{"+5 ms", load{events: o.events, distance: 5 * time.Millisecond}})
}

func burstWorkload(o options) workload {
	size := o.events / 2
	w := workload{
		name: "burst", title: "A burst over a steady load",
		about: fmt.Sprintf("%d events arrive at once, halfway through %d s of 500 events/s. The latencies are those of the steady events.", size, o.seconds),
		metrics: []metric{
			{"p50", "p50, ms", 1}, {"p99", "p99, ms", 1}, {"max", "max, ms", 0}, {"burst", "until the burst is delivered, s", 1},
		},
		ratios: []ratio{{heading: "burst beside River, tuned", metric: "burst", toSystem: nameTuned}},
	}
	bursting := func(name string, s system) entrant {
		return entrant{name, func(ctx context.Context, r *rig) (sample, error) { return r.latency(ctx, s, load{}, 500, size) }}
	}
	w.cases = []testCase{{"500/s", []entrant{bursting(nameOurs, ours{}), bursting(nameTuned, riverQueue{tuned: true})}}}
	return w
}

// beside is a workload whose cases are drained by outbox-relay, River and a bare loop.
func beside(name, title, about string, cases []load, caseName func(load) string) workload {
	w := workload{
		name: name, title: title, about: about, metrics: drainMetrics, ratios: drainRatios,
	}
	for _, l := range cases {
		w.cases = append(w.cases, testCase{caseName(l), []entrant{
			draining(nameOurs, ours{}, l), draining(nameTuned, riverQueue{tuned: true}, l), draining(nameLoop, loop{signed: true}, l),
		}})
	}
	return w
}

func payloadWorkload(o options) workload {
	cases := []load{
		{events: o.events, payload: 200}, {events: o.events, payload: 2 << 10}, {events: max(o.events/10, 10), payload: 64 << 10},
	}
	return beside("payload", "Small and large payloads", "Of the largest, a tenth as many events.", cases,
		func(l load) string { return strconv.Itoa(l.payload) + " bytes" })
}

func wireWorkload(o options) workload {
	names := map[string]string{"": "HTTP/1.1", "tls": "HTTP/1.1 with TLS", "h2": "HTTP/2 with TLS"}
	return beside("wire", "TLS and HTTP/2", "The receivers behind TLS are those of net/http, which take more of the processor than the other.",
		[]load{{events: o.events}, {events: o.events, wire: "tls"}, {events: o.events, wire: "h2"}}, func(l load) string { return names[l.wire] })
}
