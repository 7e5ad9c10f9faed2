package bench

import (
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// limits holds the figures of a drain that show what limited it.
type limits struct {
	window      time.Duration // how long the drain was observed
	inFlight    float64       // requests under way, on average
	maxInFlight int
	answer      float64 // milliseconds
	roundTrip   float64 // to the database, in milliseconds
	rate        float64
	rateLimit   float64 // 0: none
	failures    int
	busy        float64 // share of the processors of this machine; 0: not counted
	relay       float64 // processors that the relay kept busy
	server      float64 // that PostgreSQL kept busy; 0: it is elsewhere, or not counted
	load        float64 // that the producers and the receiver of this command kept busy
	processors  int
}

// shortest is the shortest drain of which String names a limit. Processor time is counted in steps
// of 10 ms, and the relay needs a moment to find out how much the receiver bears.
const shortest = 250 * time.Millisecond

// From where on something counts as used up. Averages over a run with a beginning and an end never
// reach the whole.
const (
	usedUp      = 0.85
	mostlyInUse = 0.7
)

// String says what limited the drain, with the figures that show it. The first cause that applies
// is the one: a receiver that refuses makes the relay slow down, a rate limit leaves the processors
// idle, and so on.
func (l limits) String() string {
	switch {
	case l.failures > 0:
		return fmt.Sprintf("the receiver, which refused or lost %s: the relay retries after 5 s or more, and sends it less meanwhile", plain.Plural(l.failures, "request", "requests"))
	case l.window < shortest:
		return fmt.Sprintf("unknown, since %d ms are too short to say; repeat it with more --events", l.window.Milliseconds())
	case l.rateLimit > 0 && l.rate >= mostlyInUse*l.rateLimit:
		return fmt.Sprintf("rate_limit: %.0f requests/s", l.rateLimit)
	case l.busy >= usedUp:
		return fmt.Sprintf("the processors of this machine: %.0f %% of %d were busy: the relay used %.1f processors, this command's producers and receiver %.1f, %s",
			100*l.busy, l.processors, l.relay, l.load, l.restText())
	case l.inFlight >= mostlyInUse*float64(l.maxInFlight):
		return fmt.Sprintf("the receiver's answers: %.0f of %d requests were under way all the time, for %.1f ms each; a higher max_in_flight or a faster receiver helps",
			l.inFlight, l.maxInFlight, l.answer)
	case l.roundTrip >= 2:
		return fmt.Sprintf("the network to the database: a round trip takes %.1f ms, while %.0f of %d requests were under way", l.roundTrip, l.inFlight, l.maxInFlight)
	}
	return fmt.Sprintf("the database's answers to claims and settles, as neither processors (%.0f %% busy) nor requests (%.0f of %d under way) were used up",
		100*l.busy, l.inFlight, l.maxInFlight)
}

// restText says who used the other processors.
func (l limits) restText() string {
	others := max(0, l.busy*float64(l.processors)-l.relay-l.load-l.server)
	if l.server == 0 {
		return fmt.Sprintf("PostgreSQL and other programs %.1f", others)
	}
	text := fmt.Sprintf("PostgreSQL %.1f, other programs %.1f", l.server, others)
	if others >= 0.1*float64(l.processors) {
		text += ": repeat it when they are quiet"
	}
	return text
}
