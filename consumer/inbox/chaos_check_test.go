package inbox_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
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

// check holds the facts against what the inbox promises. It decides by the database, the answers
// and the handler's own journal, not by what the inbox says of itself.
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

// checkAttempts wants every run of the handler counted as an attempt. One that a kill cut off may
// be counted or not: its outcome may have been committed before anybody could tell.
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

// chaosStory returns facts that keep every promise, with one of each fault in them:
//
//	A  worked at once, the first of its ordering key
//	B  failed once, then worked; after A
//	C  its worker killed, then worked
//	D  its worker killed after the commit
//	E  ignored by its handler
//	F  failed for good
//	G  failed for good, and ignored by an operator; after B
//	H  never acknowledged, and not recorded
func chaosStory() *chaosFacts {
	at := func(second int) time.Time { return time.Date(2026, 11, 1, 12, 0, second, 0, time.UTC) }
	f := &chaosFacts{
		events: map[string]*brought{}, rows: map[string]kept{}, runs: map[string][]run{},
		kills: map[string]time.Time{"worker-1.1": at(5)},
	}
	for key, e := range map[string]struct {
		brought
		kept
		runs []run
	}{
		"A": {brought{OrderingKey: "o", Sequence: 1, Bidding: toSucceed}, kept{"succeeded", 1, 1}, []run{{outcome: "processed"}}},
		"B": {brought{OrderingKey: "o", Sequence: 2, Bidding: toSucceed}, kept{"succeeded", 2, 2}, []run{{outcome: "failed"}, {outcome: "processed"}}},
		"C": {brought{Bidding: toSucceed}, kept{"succeeded", 1, 3}, []run{{life: "worker-1.1"}, {outcome: "processed"}}},
		"D": {brought{Bidding: toSucceed}, kept{"succeeded", 1, 1}, []run{{life: "worker-1.1"}}},
		"E": {brought{Bidding: toIgnore}, kept{"ignored", 1, 1}, []run{{outcome: "ignored"}}},
		"F": {brought{Bidding: toFail}, kept{"failed", 1, 1}, []run{{outcome: "failed"}}},
		"G": {brought{OrderingKey: "o", Sequence: 3, Bidding: toBlock}, kept{"ignored", 1, 1}, []run{{outcome: "failed"}}},
	} {
		e.Key, e.accepted, e.acknowledged = key, 1, true
		for i := range e.runs {
			if e.runs[i].life == "" {
				e.runs[i].life = "worker-2.1"
			}
		}
		f.events[key], f.rows[key], f.runs[key] = &e.brought, e.kept, e.runs
		if e.Bidding == toSucceed {
			f.effects = append(f.effects, made{key, e.OrderingKey, e.Sequence, true})
		}
	}
	f.events["D"].accepted = 0 // its first answer was lost, the next one was that of a duplicate
	f.events["H"] = &brought{Key: "H", Bidding: toSucceed}
	slices.SortFunc(f.effects, func(a, b made) int { return strings.Compare(a.key, b.key) })
	return f
}

func TestChaosCheckKeepsQuiet(t *testing.T) {
	t.Parallel()
	for _, p := range chaosStory().check() {
		if len(p.broken) > 0 {
			t.Errorf("%s: %q", p.text, p.broken)
		}
	}
}

// A checker that never failed proves nothing: each of these lies must be found out, once.
func TestChaosCheckFindsOut(t *testing.T) {
	t.Parallel()
	change := func(key string, to func(*kept)) func(*chaosFacts) {
		return func(f *chaosFacts) {
			row := f.rows[key]
			to(&row)
			f.rows[key] = row
		}
	}
	for name, lie := range map[string]struct {
		plant func(*chaosFacts)
		want  string
	}{
		"an acknowledged event is not recorded": {
			func(f *chaosFacts) {
				f.events["H"].acknowledged, f.events["H"].Bidding = true, toFail
			}, "lost: H was acknowledged",
		},
		"an event is accepted twice": {
			func(f *chaosFacts) { f.events["A"].accepted = 2 }, "A was accepted 2 times",
		},
		"an event that was never sent is recorded": {
			func(f *chaosFacts) { f.rows["X"] = kept{"succeeded", 0, 0} }, "X is recorded and was never brought",
		},
		"a duplicate is refused": {
			func(f *chaosFacts) { f.strange = append(f.strange, "A: a duplicate was answered 422") }, "A: a duplicate was answered 422",
		},
		"an event is stuck":                   {change("A", func(r *kept) { r.state = "pending" }), "A is pending, not succeeded"},
		"a worker left its claim behind":      {change("C", func(r *kept) { r.state = "processing" }), "C is processing, not succeeded"},
		"an ignored event is not shown":       {change("E", func(r *kept) { r.state = "succeeded" }), "E is succeeded, not ignored"},
		"an event is given up":                {change("B", func(r *kept) { r.state = "failed" }), "B is failed, not succeeded"},
		"an effect is lost":                   {func(f *chaosFacts) { f.effects = f.effects[1:] }, "lost: A has no effect"},
		"an effect is doubled":                {func(f *chaosFacts) { f.effects = append(f.effects, f.effects[3]) }, "doubled: D has 2 effects"},
		"a rolled back effect is there":       {func(f *chaosFacts) { f.effects = append(f.effects, made{key: "F"}) }, "F is to fail and has 1 effects"},
		"an effect of nothing":                {func(f *chaosFacts) { f.effects = append(f.effects, made{key: "X"}) }, "X was never brought and has an effect"},
		"an ordering key out of order":        {func(f *chaosFacts) { slices.Reverse(f.effects) }, "the effect of A came after that of B"},
		"two of one ordering key at once":     {func(f *chaosFacts) { f.effects[1].inTurn = false }, "B was worked before its turn"},
		"a failure is not counted":            {change("B", func(r *kept) { r.attempts = 1 }), "B: 1 attempts are counted, of 2 runs 2 came to an end"},
		"a kill is counted more than once":    {change("C", func(r *kept) { r.attempts = 3 }), "C: 3 attempts are counted, of 2 runs 1 came to an end"},
		"a run without a claim":               {change("B", func(r *kept) { r.claims = 1 }), "B: 1 claims are counted, and the handler ran 2 times"},
		"a run whose worker lives has no end": {func(f *chaosFacts) { f.runs["D"][0].life = "worker-2.1" }, `D: worker-2.1 was not killed, and its run ended with ""`},
		"a commit fails, though the database works": {
			func(f *chaosFacts) { f.runs["B"][0].outcome = "commit_failed" }, `B: worker-2.1 was not killed, and its run ended with "commit_failed"`,
		},
		"an attempt is made up": {func(f *chaosFacts) { delete(f.runs, "A") }, "A: 1 attempts are counted, and it never ran"},
		"something runs that is not recorded": {
			func(f *chaosFacts) { f.runs["H"] = []run{{life: "worker-2.1", outcome: "failed"}} }, "H is worked and not recorded",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := chaosStory()
			lie.plant(f)
			var broken []string
			for _, p := range f.check() {
				broken = append(broken, p.broken...)
			}
			if len(broken) != 1 || !strings.Contains(broken[0], lie.want) {
				t.Errorf("found %q, want %q", broken, lie.want)
			}
		})
	}
}
