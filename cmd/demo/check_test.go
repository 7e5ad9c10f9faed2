package main

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// story returns facts that keep every promise, with one of each fault in them:
//
//	A  delivered at once
//	B  refused with 500, then delivered
//	C  its answer lost, then a duplicate
//	D  its relay killed after the POST, then a duplicate
//	E  its receiver killed after the commit, then a duplicate
//	F  rolled back
//
// A and D have one ordering key.
func story() *facts {
	at := func(second int) time.Time { return time.Date(2026, 11, 1, 12, 0, second, 0, time.UTC) }
	arrived := func(key, delivery string, attempt int, relay string, f fault, status int, replayed bool) request {
		return request{
			entry:    entry{Op: opRequest, Key: key, Delivery: delivery, Attempt: attempt, Relay: relay, Fault: f},
			receiver: "logistics.2", status: status, replayed: replayed, answeredAt: at(20),
		}
	}
	f := &facts{
		invoices: map[string]time.Time{}, events: map[string]event{}, effects: map[string][]time.Time{},
		inOrder: map[string][]string{"customer": {"A", "D"}},
		shipped: map[string]bool{}, processed: map[string]bool{},
		failed:     map[string]failure{"2-default-1": {"server_error", at(20), false}, "3-default-1": {"network", at(20), false}, "5-default-1": {"network", at(20), false}},
		lost:       map[string]string{"4-default-1": "relay-1.1"},
		kills:      map[string]time.Time{"relay-1.1": at(20)},
		deaths:     map[string]time.Time{"logistics.1": at(20)},
		rolledBack: []string{"F"},
		requests: []request{
			arrived("A", "1-default-1", 1, "relay-2.1", faultNone, 201, false),
			arrived("B", "2-default-1", 1, "relay-2.1", faultRefuse, 500, false),
			arrived("B", "2-default-2", 2, "relay-2.1", faultNone, 201, false),
			arrived("C", "3-default-1", 1, "relay-2.1", faultLose, 201, false),
			arrived("C", "3-default-2", 2, "relay-2.1", faultNone, 201, true),
			arrived("D", "4-default-1", 1, "relay-1.1", faultNone, 201, false),
			arrived("D", "4-default-2", 1, "relay-2.1", faultNone, 201, true),
			arrived("E", "5-default-1", 1, "relay-2.1", faultNone, 201, false),
			arrived("E", "5-default-2", 2, "relay-2.1", faultNone, 201, true),
		},
	}
	f.requests[7].receiver = "logistics.1"
	for i, req := range f.requests {
		if req.Key == "D" {
			f.requests[i].At, f.requests[i].answeredAt = at(21+i), at(22+i)
		}
	}
	for key, e := range map[string]event{
		"A": {1, "delivered", 1, "1-default-1"},
		"B": {1, "delivered", 2, "2-default-2"},
		"C": {1, "delivered", 2, "3-default-2"},
		"D": {1, "delivered", 1, "4-default-2"},
		"E": {1, "delivered", 2, "5-default-2"},
	} {
		f.invoices[key], f.events[key] = at(1), e
		f.effects[key] = []time.Time{at(2)}
		f.shipped[key], f.processed[key] = true, true
	}
	f.effects["D"][0] = at(26)
	return f
}

func TestCheckKeepsQuiet(t *testing.T) {
	t.Parallel()
	for _, r := range story().check() {
		if len(r.broken) > 0 {
			t.Errorf("%s: %v", r.promise, r.broken)
		}
	}
	want := figures{
		committed: 5, rolledBack: 1, posts: 9, retries: 4, suppressed: 3, refused: 1, answersLost: 1, effects: 5,
		relaysKilled: 1, receiversKilled: 1, p50: time.Second, p99: time.Second,
	}
	if got := story().figures(); got != want {
		t.Errorf("figures are %+v, want %+v", got, want)
	}
}

// What a killed relay had written about an attempt may reach the database when the claim is another's by then: the log
// has it, the count may not.
func TestCheckAllowsTheLastSettleOfTheDead(t *testing.T) {
	t.Parallel()
	for attempts, broken := range map[int]int{0: 1, 1: 0, 2: 0, 3: 1} {
		f := story()
		f.requests[5].status, f.requests[5].Fault = 500, faultRefuse
		f.failed["4-default-1"] = failure{reason: "server_error"}
		e := f.events["D"]
		e.attempts = attempts
		f.events["D"] = e
		if got := f.checkRequests().broken; len(got) != broken {
			t.Errorf("%d attempts are counted: %q", attempts, got)
		}
	}
}

// A receiver and a relay that had no processor for a while meet at the end of the relay's patience.
func TestCheckAllowsAnAnswerThatIsTooLate(t *testing.T) {
	t.Parallel()
	for _, early := range []time.Duration{-time.Second, 0, lastBreath - time.Millisecond} {
		f := story()
		f.requests[3].Fault = faultNone
		f.failed["3-default-1"] = failure{"timeout", f.requests[3].answeredAt.Add(early), false}
		if got := f.checkRequests().broken; len(got) > 0 {
			t.Errorf("answered %s before the relay gave up: %q", early, got)
		}
	}
}

// A checker that never failed proves nothing: each of these lies must be found out, and by the promise that it breaks.
func TestCheckFindsOut(t *testing.T) {
	t.Parallel()
	change := func(f *facts, key string, to func(*event)) {
		e := f.events[key]
		to(&e)
		f.events[key] = e
	}
	for name, lie := range map[string]struct {
		plant func(*facts)
		want  []string // parts of the breaches
	}{
		"an effect is lost": {
			func(f *facts) { delete(f.effects, "A"); delete(f.shipped, "A"); delete(f.processed, "A") },
			[]string{"lost: A is committed", "A: 1-default-1 was answered 201 before its effect"},
		},
		"an effect is doubled": {
			func(f *facts) { f.effects["C"] = append(f.effects["C"], f.effects["C"][0]) },
			[]string{"doubled: C has 2 shipments"},
		},
		"an extra request without a cause": {
			func(f *facts) {
				extra := f.requests[0]
				extra.Delivery = "1-default-0"
				f.requests = append(f.requests, extra)
			},
			[]string{"A: 1-default-0 is an extra request without a cause"},
		},
		"one claim is POSTed twice": {
			func(f *facts) { f.requests = append(f.requests, f.requests[0]) },
			[]string{"A: 1-default-1 was POSTed twice"},
		},
		"a relay gives up an attempt that was answered": {
			func(f *facts) { f.requests[3].Fault = faultNone },
			[]string{"C: 3-default-1 was answered 201, yet the relay says network"},
		},
		"a relay does not see an answer that has been there for long": {
			func(f *facts) {
				f.requests[3].Fault = faultNone
				f.failed["3-default-1"] = failure{"timeout", f.requests[3].answeredAt.Add(lastBreath), false}
			},
			[]string{"C: 3-default-1 was answered 201, yet the relay says timeout"},
		},
		"a receiver lived on after the answer that did not arrive": {
			func(f *facts) { clear(f.deaths) },
			[]string{"E: 5-default-1 was answered 201, yet the relay says network"},
		},
		"a receiver died long after the answer that did not arrive": {
			func(f *facts) { f.deaths["logistics.1"] = f.deaths["logistics.1"].Add(time.Minute) },
			[]string{"E: 5-default-1 was answered 201, yet the relay says network"},
		},
		"a living relay loses its claim": {
			func(f *facts) { clear(f.kills) },
			[]string{"D: relay-1.1 lost its claim 4-default-1, and it was not killed"},
		},
		"marked delivered though refused": {
			func(f *facts) { f.requests[2].status = 500 },
			[]string{"B: delivered by 2-default-2, which was not answered 2xx"},
		},
		"marked delivered though the answer was lost": {
			func(f *facts) { f.requests[4].Fault = faultLose },
			[]string{"C: delivered by 3-default-2, which was not answered 2xx"},
		},
		"marked delivered and never sent": {
			func(f *facts) { f.requests = f.requests[1:] },
			[]string{"A: delivered by 1-default-1, which was never on the wire", "D was POSTed before A was taken"},
		},
		"never delivered": {
			func(f *facts) { change(f, "A", func(e *event) { e.status = "pending" }) },
			[]string{"A is pending", "A: 1-default-1 is an extra request"},
		},
		"delivered to no receiver": {
			func(f *facts) { change(f, "A", func(e *event) { e.deliveries = 0 }) },
			[]string{"A has 0 deliveries"},
		},
		"the event is missing": {
			func(f *facts) { delete(f.events, "A") },
			[]string{"A has no event", "A is no committed event and was POSTed"},
		},
		"an attempt is not counted": {
			func(f *facts) { change(f, "B", func(e *event) { e.attempts = 1 }) },
			[]string{"B: 1 attempts are counted, 2 were made"},
		},
		"a lost claim is counted as an attempt": {
			func(f *facts) { change(f, "D", func(e *event) { e.attempts = 2 }) },
			[]string{"D: 2 attempts are counted, 1 were made"},
		},
		"answered before the commit": {
			func(f *facts) { f.effects["A"][0] = f.requests[0].answeredAt.Add(time.Microsecond) },
			[]string{"A: 1-default-1 was answered 201 before its effect was committed"},
		},
		"an effect of what was rolled back": {
			func(f *facts) { f.effects["F"] = f.effects["A"] },
			[]string{"F is no committed invoice and has a shipment"},
		},
		"an event of what was rolled back": {
			func(f *facts) { f.events["F"] = event{1, "pending", 0, "6-default-0"} },
			[]string{"F was rolled back and has an event"},
		},
		"a request for what was rolled back": {
			func(f *facts) {
				f.requests = append(f.requests, request{entry: entry{Key: "F", Delivery: "6-default-1"}})
			},
			[]string{"F is no committed event and was POSTed"},
		},
		"a memory without its effect": {
			func(f *facts) { f.processed["G"] = true },
			[]string{"G is processed and not shipped"},
		},
		"an effect without its memory": {
			func(f *facts) { delete(f.processed, "A") },
			[]string{"A is shipped and not processed"},
		},
		"a later one of its key is sent before the earlier one was taken": {
			func(f *facts) { f.requests[5].At = f.requests[0].answeredAt.Add(-time.Millisecond) },
			[]string{"D was POSTed before A was taken"},
		},
		"a later one of its key is sent though the earlier one was never taken": {
			func(f *facts) { f.requests[0].status = 500 },
			[]string{"A: delivered by 1-default-1, which was not answered 2xx", "D was POSTed before A was taken"},
		},
		"a later one of its key has its effect first": {
			func(f *facts) { f.effects["D"][0] = f.effects["A"][0].Add(-time.Microsecond) },
			[]string{"the effect of D came before that of A"},
		},
		"a producer commits a key's events in another order than that of their ids": {
			func(f *facts) { f.invoices["D"] = f.invoices["A"].Add(-time.Microsecond) },
			[]string{"D was committed before A, and has the larger id"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := story()
			lie.plant(f)
			var broken []string
			for _, r := range f.check() {
				broken = append(broken, r.broken...)
			}
			if len(broken) != len(lie.want) {
				t.Fatalf("found %q, want %q", broken, lie.want)
			}
			for _, want := range lie.want {
				if !slices.ContainsFunc(broken, func(b string) bool { return strings.Contains(b, want) }) {
					t.Errorf("found %q, want %q", broken, want)
				}
			}
		})
	}
}

func TestFaultsAreDrawnAsOften(t *testing.T) {
	t.Parallel()
	f := faults{Late: 0.1, Refuse: 0.2, Lose: 0.3}
	counts := map[fault]int{}
	const draws = 10_000
	for n := range draws {
		kind, late := f.pick(7, string(rune('a'+n%26))+count(n))
		counts[kind]++
		if (kind == faultLate) != (late > 0) || late > latest {
			t.Fatalf("fault %q is %s late", kind, late)
		}
	}
	for kind, share := range map[fault]float64{faultLate: 0.1, faultRefuse: 0.2, faultLose: 0.3, faultNone: 0.4} {
		if got := float64(counts[kind]) / draws; got < share-0.03 || got > share+0.03 {
			t.Errorf("fault %q has a share of %.3f, want %.2f", kind, got, share)
		}
	}
	again := maps.Clone(counts)
	for n := range draws {
		kind, _ := f.pick(7, string(rune('a'+n%26))+count(n))
		again[kind]--
	}
	for kind, n := range again {
		if n != 0 {
			t.Errorf("the same seed drew fault %q another number of times", kind)
		}
	}
}
