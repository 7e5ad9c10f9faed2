package history

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// story is a history that keeps every promise, with one of each cause of a second request in it:
//
//	A  delivered at once
//	B  refused on purpose, with 500, and with 429 and a time to wait, then delivered
//	C  accepted by the receiver, while tables were altered, its relay killed, then a duplicate
//	D  sent while a receiver was frozen, no answer, then delivered
//	E  rolled back
//
// A and C have one ordering key.
func story() (calls []Call, t Tables) {
	n := 0
	call := func(kind Kind, who, key, delivery string, from, to float64, o Outcome, status int, note string) {
		n++
		c := Call{
			Record: Record{At: seconds(from), Call: n, Kind: kind, Who: who, Key: key, Delivery: delivery, Outcome: o, Status: status, Note: note},
			To:     seconds(to),
		}
		switch kind {
		case Post:
			c.Claimed, c.Receiver = c.At, "receiver-1"
		case Fault:
			c.Harm = Undoes
		}
		calls = append(calls, c)
	}
	for key, at := range map[string]float64{"A": 1, "B": 1, "C": 19, "D": 39} {
		call(Commit, "producer-1", key, "", at, at+0.1, OK, 0, "")
	}
	call(Commit, "producer-1", "E", "", 1, 1.1, Fail, 0, "")
	call(Post, "relay-1.1", "A", "1-d-1", 2, 2.1, OK, 200, "")
	call(Post, "relay-1.1", "B", "2-d-1", 2, 2.1, Fail, 500, "refused")
	call(Post, "relay-1.1", "B", "2-d-2", 3, 3.1, Fail, 429, "busy")
	call(Post, "relay-1.1", "B", "2-d-3", 4.2, 4.3, OK, 200, "")
	call(Fault, Relays, "", "", 20.05, 23, OK, 0, "tables altered")
	calls[len(calls)-1].Harm = Delays
	call(Post, "relay-1.1", "C", "3-d-1", 20, 20.1, OK, 200, "")
	call(Fault, "relay-1", "", "", 25.5, 25.6, OK, 0, "relay killed")
	call(Post, "relay-2.1", "C", "3-d-2", 27, 27.1, OK, 200, "")
	call(Post, "relay-2.1", "D", "4-d-1", 40, 42, Unknown, 0, "")
	call(Fault, "receiver-1", "", "", 39, 42, OK, 0, "receiver frozen")
	call(Post, "relay-2.1", "D", "4-d-2", 43, 43.1, OK, 200, "")
	call(Alert, "relay-1.1", "held firing", "", 25.4, 25.4, OK, 200, "") // and its relay killed
	call(Alert, "relay-2.1", "held firing", "", 27, 27, OK, 200, "")
	t = Tables{
		Business: []string{"A", "B", "C", "D"},
		Events: []Event{
			{1, "A", "k", "delivered", "1-d-1", 1, seconds(2.2), seconds(1)},
			{2, "B", "", "delivered", "2-d-3", 3, seconds(4.4), seconds(1)},
			{3, "C", "k", "delivered", "3-d-2", 1, seconds(27.2), seconds(19)},
			{4, "D", "", "delivered", "4-d-2", 2, seconds(43.2), seconds(39)},
		},
		Told:      []Told{{"held", "firing", seconds(27.1)}},
		Effects:   []Effect{{1, "A", seconds(2.05)}, {2, "B", seconds(4.25)}, {3, "C", seconds(20.05)}, {4, "D", seconds(41)}},
		Processed: []string{"A", "B", "C", "D"},
		Worked:    []Work{{"A", "succeeded", 1, false, "succeeded", 1}, {"B", "succeeded", 2, false, "succeeded", 2}, {"C", "ignored", 1, false, "ignored", 1}},
		Failures: []Failure{
			{"B", "2-d-1", "relay-1.1", seconds(2), seconds(2.1), 500, false, true},
			{"B", "2-d-2", "relay-1.1", seconds(3), seconds(3.1), 429, false, true},
			{"D", "4-d-1", "relay-2.1", seconds(40), seconds(42), 0, false, true},
		},
		Timeout:  seconds(5),
		Schedule: []time.Duration{seconds(0.5), seconds(0.8)}, RetryAfter: seconds(1),
	}
	return calls, t
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func TestCheckKeepsQuiet(t *testing.T) {
	t.Parallel()
	for _, b := range Check(story()) {
		t.Error(b)
	}
	calls, tables := story() // in which an alert is sent by a relay that stood still while another one sent it
	calls[slices.IndexFunc(calls, func(c Call) bool { return c.Kind == Alert })].Who = "relay-3.1"
	frozen := Call{Record: Record{At: seconds(25.3), Call: len(calls) + 1, Kind: Fault, Who: "relay-2", Outcome: OK, Note: "frozen", Harm: Undoes}, To: seconds(26.9)}
	for _, b := range Check(append(calls, frozen), tables) {
		t.Error(b)
	}
}

// Each lie about the story is found, by the rule that it breaks.
func TestCheckFindsPlantedViolations(t *testing.T) {
	t.Parallel()
	find := func(calls []Call, delivery string) *Call {
		return &calls[slices.IndexFunc(calls, func(c Call) bool { return c.Delivery == delivery })]
	}
	copies := func(calls []Call, delivery string, events, each int) []Call {
		p := *find(calls, delivery)
		for i := range events * each {
			p.Delivery = fmt.Sprintf("%s-%d", delivery, i)
			if events > 1 {
				p.Key = fmt.Sprintf("%s-%d", delivery, i/each)
			}
			calls = append(calls, p)
		}
		return calls
	}
	fault := func(calls []Call, note string) *Call {
		return &calls[slices.IndexFunc(calls, func(c Call) bool { return c.Note == note })]
	}
	for name, plant := range map[string]struct {
		lie  func(calls []Call, t *Tables) []Call
		rule string
		key  string
	}{
		"an effect is missing":        {func(c []Call, t *Tables) []Call { t.Effects, t.Processed = t.Effects[1:], t.Processed[1:]; return c }, Lost, "A"},
		"a committed row is missing":  {func(c []Call, t *Tables) []Call { t.Business = t.Business[1:]; return c }, Lost, "A"},
		"an event is missing":         {func(c []Call, t *Tables) []Call { t.Events = t.Events[1:]; return c }, Lost, "A"},
		"a delivery failed":           {func(c []Call, t *Tables) []Call { t.Events[1].Status = "failed"; return c }, Lost, "B"},
		"a rolled-back row is there":  {func(c []Call, t *Tables) []Call { t.Business = append(t.Business, "E"); return c }, Phantom, "E"},
		"a POST of what never was":    {func(c []Call, _ *Tables) []Call { find(c, "1-d-1").Key = "X"; return c }, Phantom, "X"},
		"an effect of what never was": {func(c []Call, t *Tables) []Call { t.Effects[0].Key = "E"; return c }, Phantom, "E"},
		"delivered without a 2xx":     {func(c []Call, _ *Tables) []Call { p := find(c, "1-d-1"); p.Outcome, p.Status = Fail, 500; return c }, False, "A"},
		"delivered, the answer lost":  {func(c []Call, _ *Tables) []Call { find(c, "1-d-1").Outcome = Unknown; return c }, False, "A"},
		"delivered by another claim":  {func(c []Call, t *Tables) []Call { t.Events[0].Delivery = "1-d-9"; return c }, False, "A"},
		"an effect twice": {func(c []Call, t *Tables) []Call {
			t.Effects = append(t.Effects, Effect{9, "B", seconds(4.28)})
			return c
		}, Doubled, "B"},
		"an effect is not remembered": {func(c []Call, t *Tables) []Call { t.Processed = t.Processed[1:]; return c }, Dedupe, "A"},
		"memory without an effect":    {func(c []Call, t *Tables) []Call { t.Processed = append(t.Processed, "X"); return c }, Dedupe, "X"},
		"a torn snapshot":             {func(c []Call, t *Tables) []Call { t.Torn = []string{"at 3s"}; return c }, Dedupe, ""},
		"2xx before the commit":       {func(c []Call, t *Tables) []Call { t.Effects[0].At = seconds(2.2); return c }, Early, "A"},
		"no kill, yet a duplicate":    {func(c []Call, _ *Tables) []Call { fault(c, "relay killed").Who = "relay-3"; return c }, Unexplained, "C"},
		"the kill came much later": {func(c []Call, _ *Tables) []Call {
			f := fault(c, "relay killed")
			f.At, f.To = seconds(26.5), seconds(26.6)
			return c
		}, Unexplained, "C"},
		"the kill came before": {func(c []Call, _ *Tables) []Call {
			f := fault(c, "relay killed")
			f.At, f.To = seconds(10), seconds(11)
			find(c, "3-d-1").Claimed = seconds(13)
			return c
		}, Unexplained, "C"},
		"a 500 that nobody made":      {func(c []Call, _ *Tables) []Call { find(c, "2-d-1").Note = ""; return c }, Unexplained, "B"},
		"no receiver was frozen":      {func(c []Call, _ *Tables) []Call { fault(c, "receiver frozen").Who = "relay-3"; return c }, Unexplained, "D"},
		"a reload is no kill":         {func(c []Call, _ *Tables) []Call { fault(c, "relay killed").Harm = None; return c }, Unexplained, "C"},
		"tables were not altered":     {func(c []Call, _ *Tables) []Call { fault(c, "tables altered").Who = "relay-2"; return c }, Unexplained, "C"},
		"no kill, tables altered":     {func(c []Call, _ *Tables) []Call { fault(c, "relay killed").Harm = Delays; return c }, Unexplained, "C"},
		"another receiver was frozen": {func(c []Call, _ *Tables) []Call { fault(c, "receiver frozen").Who = "receiver-2"; return c }, Unexplained, "D"},
		"a refusal while relays were hit": {func(c []Call, _ *Tables) []Call {
			p := find(c, "4-d-1")
			p.Outcome, p.Status = Fail, 503
			fault(c, "receiver frozen").Who = Relays
			return c
		}, Unexplained, "D"},
		"in hand, of no relay": {func(c []Call, _ *Tables) []Call {
			p := find(c, "2-d-1")
			p.Status, p.Note = 409, ""
			return c
		}, Unexplained, "B"},
		"in hand, long after the fault": {func(c []Call, _ *Tables) []Call {
			p := *find(c, "4-d-1")
			p.Delivery, p.Outcome, p.Status, p.Call, p.At, p.Claimed, p.To = "4-d-3", Fail, 409, len(c)+1, seconds(47.2), seconds(47.2), seconds(47.3)
			return append(c, p)
		}, Unexplained, "D"},
		"many were refused": {func(c []Call, _ *Tables) []Call { return copies(c, "4-d-1", 301, 1) }, Refused, ""},
		"a first request came late": {func(c []Call, t *Tables) []Call {
			t.Events[2].DueAt = seconds(1)
			c[slices.IndexFunc(c, func(c Call) bool { return c.Key == "C" })].To = seconds(1)
			return c
		}, Slow, "C"},
		"refused for good, and delivered": {func(c []Call, _ *Tables) []Call {
			c[slices.IndexFunc(c, func(c Call) bool { return c.Key == "A" })].Note = Unfit
			return c
		}, False, "A"},
		"a failure without an attempt": {func(c []Call, t *Tables) []Call {
			t.Failures = append(t.Failures, Failure{"A", "1-d-0", "relay-1.1", seconds(1.5), seconds(1.6), 0, false, true})
			t.Events[0].Attempts = 2
			return c
		}, Attempts, "A"},
		"a second retry too soon": {func(c []Call, t *Tables) []Call {
			find(c, "2-d-3").At, t.RetryAfter = seconds(3.7), 0
			return c
		}, Schedule, "B"},
		"a retry before Retry-After": {func(c []Call, _ *Tables) []Call { find(c, "2-d-3").At = seconds(4); return c }, Schedule, "B"},
		"an alert is sent twice": {func(c []Call, _ *Tables) []Call {
			c[slices.IndexFunc(c, func(c Call) bool { return c.Kind == Alert })].Who = "relay-2.1"
			return c
		}, Alerted, "held firing"},
		"a relay stood still between two of its alerts": {func(c []Call, _ *Tables) []Call {
			c[slices.IndexFunc(c, func(c Call) bool { return c.Kind == Alert })].Who = "relay-3.1"
			return append(c, Call{Record: Record{At: seconds(25.5), Call: len(c) + 1, Kind: Fault, Who: "relay-2", Outcome: OK, Note: "frozen", Harm: Undoes}, To: seconds(27)})
		}, Alerted, "held firing"},
		"rows were locked between two alerts": {func(c []Call, _ *Tables) []Call {
			c[slices.IndexFunc(c, func(c Call) bool { return c.Kind == Alert })].Who = "relay-3.1"
			return append(c, Call{Record: Record{At: seconds(25.3), Call: len(c) + 1, Kind: Fault, Who: Relays, Outcome: OK, Harm: Delays}, To: seconds(27)})
		}, Alerted, "held firing"},
		"the sender of the second alert was slow": {func(c []Call, _ *Tables) []Call {
			c[slices.IndexFunc(c, func(c Call) bool { return c.Kind == Alert })].Who = "relay-3.1"
			return append(c, Call{Record: Record{At: seconds(25.3), Call: len(c) + 1, Kind: Fault, Who: "relay-2", Outcome: OK, Harm: Delays}, To: seconds(27)})
		}, Alerted, "held firing"},
		"an event is sent early": {func(c []Call, t *Tables) []Call { t.Events[0].DueAt = seconds(2.1); return c }, Undue, "A"},
		"a delivered event is claimed again": {func(c []Call, _ *Tables) []Call {
			p := *find(c, "3-d-2")
			p.Delivery, p.Claimed, p.At, p.To = "3-d-3", seconds(28), seconds(28), seconds(28.1)
			return append(c, p)
		}, Reclaimed, "C"},
		"an alert is noted and not sent":      {func(c []Call, t *Tables) []Call { t.Told[0].State = "resolved"; return c }, Untold, "held"},
		"notes of an alert that is not sent":  {func(c []Call, t *Tables) []Call { t.Told = append(t.Told, t.Told[0], t.Told[0]); return c }, Untold, "held"},
		"one event accepted often":            {func(c []Call, _ *Tables) []Call { return copies(c, "3-d-1", 1, 4) }, Repeated, "C"},
		"a receiver's fault undoes no settle": {func(c []Call, _ *Tables) []Call { return copies(c, "3-d-1", 1, 2) }, Repeated, ""},
		"many events accepted twice":          {func(c []Call, _ *Tables) []Call { return copies(c, "3-d-1", 301, 2) }, Repeated, ""},
		"delivered before the answer":         {func(c []Call, t *Tables) []Call { t.Events[0].DeliveredAt = seconds(2.05); return c }, False, "A"},
		"another answer is logged":            {func(c []Call, t *Tables) []Call { t.Failures[0].Status = 503; return c }, Attempts, "B"},
		"undone is answered as 500": {func(c []Call, t *Tables) []Call {
			p := find(c, "2-d-1")
			p.Status, p.Note = 200, Undone
			t.Failures[0].Status = 200
			return c
		}, Attempts, "B"},
		"an answer that is not logged": {func(c []Call, t *Tables) []Call { t.Failures[0].Status = 0; return c }, Attempts, "B"},
		"an answer that never came":    {func(c []Call, t *Tables) []Call { t.Failures[2].Status = 200; return c }, Attempts, "D"},
		"a retry too soon":             {func(c []Call, _ *Tables) []Call { find(c, "2-d-2").At = seconds(2.3); return c }, Schedule, "B"},
		"the last request is late":     {func(c []Call, _ *Tables) []Call { find(c, "4-d-2").At = seconds(60); return c }, Late, ""},
		"a payload under another key":  {func(c []Call, t *Tables) []Call { t.Effects[1].Key = "A"; return c }, Doubled, "A"},
		"twice under one claim":        {func(c []Call, _ *Tables) []Call { return append(c, *find(c, "1-d-1")) }, Unexplained, "A"},
		"a key's events swapped":       {func(c []Call, t *Tables) []Call { t.Effects[0].Number = 8; return c }, Order, "C"},
		"sent before its head":         {func(c []Call, _ *Tables) []Call { find(c, "1-d-1").To = seconds(25); return c }, Order, "C"},
		"attempts never made":          {func(c []Call, t *Tables) []Call { t.Events[0].Attempts = 2; return c }, Attempts, "A"},
		"attempts not counted":         {func(c []Call, t *Tables) []Call { t.Events[1].Attempts = 1; return c }, Attempts, "B"},
		"a failure is not logged":      {func(c []Call, t *Tables) []Call { t.Failures = t.Failures[1:]; return c }, Attempts, "B"},
		"an answer that was not there": {func(c []Call, t *Tables) []Call { t.Failures[0].Delivery = "2-d-7"; return c }, Attempts, "B"},
		"delivered, then pending":      {func(c []Call, t *Tables) []Call { t.Reopened = []string{"1 delivered > pending"}; return c }, NotTerminal, ""},
		"recorded twice": {func(c []Call, _ *Tables) []Call {
			find(c, "3-d-1").Status, find(c, "3-d-2").Status = 202, 202
			return c
		}, Dedupe, "C"},
		"a record is missing": {func(c []Call, t *Tables) []Call {
			find(c, "1-d-1").Status, t.Worked = 202, t.Worked[1:]
			return c
		}, Lost, "A"},
		"not worked at the end":    {func(c []Call, t *Tables) []Call { t.Worked[0].State = "processing"; return c }, WrongEnd, "A"},
		"ignored, and not shown":   {func(c []Call, t *Tables) []Call { t.Worked[0].End = "ignored"; return c }, WrongEnd, "A"},
		"a run that is no attempt": {func(c []Call, t *Tables) []Call { t.Worked[1].Attempts = 1; return c }, Attempts, "B"},
		"worked before its turn":   {func(c []Call, t *Tables) []Call { t.Worked[2].Early = true; return c }, Order, "C"},
		"a claim at the end":       {func(c []Call, t *Tables) []Call { t.Open = []string{"delivery 1"}; return c }, InFlight, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			calls, tables := story()
			calls = plant.lie(calls, &tables)
			found := Check(calls, tables)
			if !slices.ContainsFunc(found, func(b Breach) bool { return b.Rule == plant.rule && b.Key == plant.key }) {
				t.Errorf("found %v, want %s of %q", found, plant.rule, plant.key)
			}
		})
	}
}

// A call that never returned is unknown, and each line is one record.
func TestHistory(t *testing.T) {
	t.Parallel()
	h := New()
	done := h.Invoke(Record{Kind: Commit, Who: "producer-1", Key: "A"})
	_ = h.Invoke(Record{Kind: Commit, Who: "producer-2", Key: "B"})
	done(OK, 0, "")
	calls := h.Calls()
	if len(calls) != 2 || calls[0].Outcome != OK || calls[1].Outcome != Unknown || calls[1].Key != "B" || calls[0].To < calls[0].At {
		t.Errorf("calls %+v", calls)
	}
	var text strings.Builder
	if _, err := h.WriteTo(&text); err != nil || strings.Count(text.String(), "\n") != 3 {
		t.Errorf("%v: %q, want 3 lines", err, text.String())
	}
}
