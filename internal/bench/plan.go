package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/measure"
)

// costs are what one event takes, as measured in the same run.
type costs struct {
	insert, deliver       float64 // µs of PostgreSQL's processors
	relay                 float64 // µs of the relay's
	insertWAL, deliverWAL float64 // bytes
}

// The servers of the plan, with processors like those of the measurement.
const (
	planProcessors = 8
	// The most of its processors that a producer's database should give to its outbox: it has other
	// work.
	planShare = 0.25
	// relayProcessors is how much of the processors one relay uses at most: its claimer is one.
	relayProcessors = 2
)

// A layout spreads a load over databases.
type layout struct {
	name      string
	databases int
	largest   float64 // share of the busiest database
}

var layouts = []layout{
	{"one database", 1, 1},
	{"4 databases, evenly", 4, 0.25},
	{"20 tenants, the largest has a fifth", 20, 0.2},
}

// planLoads are in events a second over all databases.
var planLoads = []float64{100, 1000, 5000, 10_000, 20_000, 50_000}

// saturation returns at how many events a second a database has given the outbox its share.
func (c costs) saturation() float64 { return planShare * planProcessors * 1e6 / (c.insert + c.deliver) }

// A forecast is what a load costs in a layout.
type forecast struct {
	processors float64 // that the outbox keeps busy in the busiest database
	wait       float64 // ms, p99: until the processors that the outbox may have are free
	relays     int     // over all databases
	wal        float64 // MB/s of the busiest database
}

func (c costs) forecast(perSecond float64, l layout) (f forecast) {
	busiest := perSecond * l.largest
	f.processors = busiest * (c.insert + c.deliver) / 1e6
	f.wal = busiest * (c.insertWAL + c.deliverWAL) / 1e6
	rest := 0.0
	if l.databases > 1 {
		rest = (perSecond - busiest) / float64(l.databases-1)
	}
	needed := func(perSecond float64) int { return max(1, int(math.Ceil(perSecond*c.relay/1e6/relayProcessors))) }
	f.relays = needed(busiest) + (l.databases-1)*needed(rest)
	if f.processors >= planShare*planProcessors {
		f.wait = math.Inf(1)
		return f
	}
	waits := simulate(busiest, (c.insert+c.deliver)/1e6, planShare*planProcessors, 200_000)
	f.wait = measure.Quantile(waits, 0.99) * 1000
	return f
}

// simulate returns the sorted waits, in seconds, of so many events that arrive at random times, so
// many a second on average. Each needs a processor for service seconds, and one queue stands before
// all processors.
func simulate(perSecond, service, processors float64, events int) []float64 {
	random := rand.New(rand.NewPCG(1, 2)) // the same numbers in each run
	free := make([]float64, max(1, int(processors)))
	waits := make([]float64, events)
	now := 0.0
	for i := range waits {
		now += random.ExpFloat64() / perSecond
		first := 0
		for p, at := range free {
			if at < free[first] {
				first = p
			}
		}
		begin := max(now, free[first])
		waits[i] = begin - now
		free[first] = begin + service
	}
	slices.Sort(waits)
	return waits
}

// planCosts are the medians of what the workload measured.
func planCosts(all results) costs {
	of := func(testCase, key string) float64 { return median(all.values(place{testCase, nameOurs}, key)) }
	return costs{
		insert: of(planInsert, "server"), deliver: of(planDeliver, "server"), relay: of(planDeliver, "process"),
		insertWAL: of(planInsert, "wal"), deliverWAL: of(planDeliver, "wal"),
	}
}

// planTable writes the forecast.
func planTable(all results) string {
	c := planCosts(all)
	var text strings.Builder
	fmt.Fprintf(&text, "\nA database server with %d such processors, of which the outbox may keep %.0f %% busy, bears **%s events/s**: that is where a second database begins to pay. "+
		"A relay keeps one processor busy at %s events/s.\n\n",
		planProcessors, 100*planShare, number(c.saturation(), 0), number(1e6/c.relay, 0))
	text.WriteString("| events/s | layout | busiest database: processors | its WAL, MB/s | wait for a processor, p99 ms | relays |\n|--:|---|--:|--:|--:|--:|\n")
	for _, perSecond := range planLoads {
		for _, l := range layouts {
			f := c.forecast(perSecond, l)
			wait := number(f.wait, 2)
			if math.IsInf(f.wait, 1) {
				wait = "beyond its share"
			}
			fmt.Fprintf(&text, "| %s | %s | %s | %s | %s | %d |\n", number(perSecond, 0), l.name, number(f.processors, 2), number(f.wal, 1), wait, f.relays)
		}
	}
	return text.String()
}
