package inbox_test

import (
	"fmt"
	"slices"
	"time"
)

// A bidding is what the handler does to an event, and so the state in which the event must end.
type bidding string

const (
	toSucceed bidding = "succeed"
	toIgnore  bidding = "ignore"
	toFail    bidding = "fail"   // for good, at the first attempt
	toBlock   bidding = "poison" // the same, at the head of an ordering key: an operator ignores it
)

// end returns the state in which an event ends.
func (b bidding) end() string {
	switch b {
	case toIgnore, toBlock:
		return "ignored"
	case toFail:
		return "failed"
	}
	return "succeeded"
}

// brought is an event that the test brought, and what it was answered.
type brought struct {
	Key         string  `json:"-"`
	OrderingKey string  `json:"-"`
	Sequence    int64   `json:"-"` // from 1 within its ordering key
	Type        string  `json:"-"`
	Bidding     bidding `json:"bidding"`

	accepted     int  // how often it was answered 202
	acknowledged bool // it was answered 2xx

	beside map[string]bool // by the neighbours that were brought it, and answered 2xx
}

// kept is an event's row in inbox_events, if the memory has one as well.
type kept struct {
	state    string
	attempts int
	claims   int
}

// made is one effect.
type made struct {
	key, orderingKey string
	sequence         int64
	inTurn           bool // no other event of the key was running then, and no earlier one waiting
}

// run is one run of the handler.
type run struct {
	life    string // of the process
	began   time.Time
	outcome string // what Observe got, once it was committed; empty: unknown, the process died first
}

// chaosFacts are what is left of a chaos to be judged.
type chaosFacts struct {
	events  map[string]*brought
	strange []string // answers that no rule allows
	rows    map[string]kept
	effects []made // in the order in which they were made
	runs    map[string][]run
	kills   map[string]time.Time // the lives that the test ended
}

// A promise is one that the inbox gives, and every way in which the facts break it.
type promise struct {
	text   string
	broken []string
}

func (p *promise) breach(format string, args ...any) {
	p.broken = append(p.broken, fmt.Sprintf(format, args...))
}

// check holds the facts against what the inbox promises. It decides by the database, the answers and the handler's own
// journal, not by what the inbox says of itself.
func (f *chaosFacts) check() []promise {
	promises := []promise{f.checkRecorded(), f.checkStates(), f.checkEffects(), f.checkOrder(), f.checkAttempts()}
	for i := range promises {
		slices.Sort(promises[i].broken)
	}
	return promises
}

func (f *chaosFacts) checkRecorded() promise {
	p := promise{text: "an event that was acknowledged is recorded, accepted once, and a duplicate ever after", broken: slices.Clone(f.strange)}
	for key, e := range f.events {
		_, recorded := f.rows[key]
		switch {
		case e.acknowledged && !recorded:
			p.breach("lost: %s was acknowledged and is not recorded", key)
		case e.accepted > 1:
			p.breach("%s was accepted %d times", key, e.accepted)
		}
	}
	for key := range f.rows {
		if _, ok := f.events[key]; !ok {
			p.breach("%s is recorded and was never brought", key)
		}
	}
	return p
}

func (f *chaosFacts) checkStates() promise {
	p := promise{text: "every event ends in the state that its handler, or an operator, asked for"}
	for key, row := range f.rows {
		if e, ok := f.events[key]; ok && row.state != e.Bidding.end() {
			p.breach("%s is %s, not %s", key, row.state, e.Bidding.end())
		}
	}
	return p
}

func (f *chaosFacts) checkEffects() promise {
	p := promise{text: "every event that is to succeed has one effect, and no other has any"}
	effects := map[string]int{}
	for _, effect := range f.effects {
		effects[effect.key]++
		if _, ok := f.events[effect.key]; !ok {
			p.breach("%s was never brought and has an effect", effect.key)
		}
	}
	for key, e := range f.events {
		switch n := effects[key]; {
		case e.Bidding != toSucceed && n > 0:
			p.breach("%s is to %s and has %d effects", key, e.Bidding, n)
		case e.Bidding == toSucceed && e.acknowledged && n == 0:
			p.breach("lost: %s has no effect", key)
		case e.Bidding == toSucceed && n > 1:
			p.breach("doubled: %s has %d effects", key, n)
		}
	}
	return p
}

func (f *chaosFacts) checkOrder() promise {
	p := promise{text: "events of one ordering key are worked one at a time, in the order of their sequence"}
	last := map[string]made{}
	for _, effect := range f.effects {
		if effect.orderingKey == "" {
			continue
		}
		if before, ok := last[effect.orderingKey]; ok && before.sequence > effect.sequence {
			p.breach("the effect of %s came after that of %s", effect.key, before.key)
		}
		if !effect.inTurn {
			p.breach("%s was worked before its turn", effect.key)
		}
		last[effect.orderingKey] = effect
	}
	return p
}

// checkAttempts wants every run of the handler counted as an attempt. One that a kill cut off may be counted or not: its
// outcome may have been committed before anybody could tell.
func (f *chaosFacts) checkAttempts() promise {
	p := promise{text: "every run of the handler is an attempt, and no attempt is made up"}
	for key, runs := range f.runs {
		row, recorded := f.rows[key]
		if !recorded {
			p.breach("%s is worked and not recorded", key)
			continue
		}
		finished := 0
		for _, r := range runs {
			_, killed := f.kills[r.life]
			switch {
			case r.outcome != "" && r.outcome != "commit_failed":
				finished++
			case !killed:
				p.breach("%s: %s was not killed, and its run ended with %q", key, r.life, r.outcome)
			}
		}
		if row.attempts < finished || row.attempts > len(runs) {
			p.breach("%s: %d attempts are counted, of %d runs %d came to an end", key, row.attempts, len(runs), finished)
		}
		if row.claims < len(runs) {
			p.breach("%s: %d claims are counted, and the handler ran %d times", key, row.claims, len(runs))
		}
	}
	for key, row := range f.rows {
		if len(f.runs[key]) == 0 && row.attempts > 0 {
			p.breach("%s: %d attempts are counted, and it never ran", key, row.attempts)
		}
	}
	return p
}
