package inbox_test

import (
	"slices"
	"strings"
	"testing"
	"time"
)

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
