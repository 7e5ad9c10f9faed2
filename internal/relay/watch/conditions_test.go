package watch

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// No condition counts one of many, or names an event that is not known.
func TestConditionTextsAreComplete(t *testing.T) {
	t.Parallel()
	defect := regexp.MustCompile(`event 0\b|\b1 (deliveries|attempts|events|keys|relays|sessions|rows)\b|\b1 (more hold|keys wait)\b|: *[.;:]|: *$|  |First\.|holds \.|""`)
	now := time.Now()
	limits := alert.Config{}.WithDefaults()
	for _, n := range []int{1, 2, countedTo + 1} {
		s := sample{
			Database: "db", now: now, at: now, Undelivered: &UndeliveredSample{Count: n, Event: 7},
			Lanes:  []laneSample{{Destination: "shop", LagSeconds: 3600, Event: 7, Blocked: n, BlockedSeconds: 60, BlockedKey: "k", BlockedEvent: 7}},
			Parked: &parkedSample{Count: n, Event: 7, Seconds: 60}, // of an event that is gone
		}
		s.Rescues.Relays = rescueStorm
		prepared := `{"kind": "prepared", "name": "p", "user": "u", "seconds": 3600}`
		testkit.Must(t, json.Unmarshal([]byte("["+strings.TrimPrefix(strings.Repeat(","+prepared, min(n, 3)), ",")+"]"), &s.VacuumBlockers))
		hold, _ := s.conditions(limits, nil)
		testkit.Equal(t, "conditions", len(hold), 6)
		for _, c := range hold {
			if found := defect.FindString(c.detail); found != "" {
				t.Errorf("%q in: %s", found, c.detail)
			}
		}
	}
}

// An alert of any rule ends once nothing keeps it open, or it would stay for ever. Only a person
// ends a quarantine.
func TestAlertsOfAllRulesEnd(t *testing.T) {
	t.Parallel()
	for _, rule := range alert.Rules() {
		s := sample{Alerts: []alertSample{{subject: subject{rule, "d"}, Left: true}}}
		if ended := s.ended(nil, nil); len(ended) == 0 && rule != alert.RuleQuarantined {
			t.Errorf("an alert of the rule %s never ends", rule)
		}
	}
}

// What follows from a look, without a database.
func TestConditions(t *testing.T) {
	t.Parallel()
	limits, now := alert.Config{}.WithDefaults(), time.Now()
	lane := func(l laneSample) sample { l.Destination = "d"; return sample{Database: "db", Lanes: []laneSample{l}} }
	open := func(s sample, rule, about string, failed bool) sample {
		s.Alerts = append(s.Alerts, alertSample{subject: subject{rule, about}, Failed: failed})
		return s
	}
	told := func(blocked int, by int64) sample { // the alert failed names event 7
		s := open(lane(laneSample{Blocked: blocked, BlockedEvent: by}), alert.RuleFailed, "d", true)
		s.Alerts[0].Event = 7
		return s
	}
	for name, c := range map[string]struct {
		seen        sample
		hold, ended string
	}{
		"nothing":                    {sample{}, "[]", "[]"},
		"no lag yet":                 {lane(laneSample{LagSeconds: 599}), "[]", "[]"},
		"lag":                        {lane(laneSample{LagSeconds: 601}), "[{lag d}]", "[]"},
		"a held lane does not lag":   {lane(laneSample{LagSeconds: 9999, Held: true}), "[]", "[]"},
		"nor has it recovered":       {open(lane(laneSample{Held: true}), alert.RuleLag, "d", false), "[]", "[]"},
		"no more lag":                {open(lane(laneSample{}), alert.RuleLag, "d", false), "[]", "[{lag d}]"},
		"nothing left to lag":        {open(sample{}, alert.RuleLag, "d", false), "[]", "[{lag d}]"},
		"another relay's":            {open(sample{}, alert.RuleBreakerOpen, "d", false), "[]", "[]"},
		"failed deliveries are left": {open(sample{}, alert.RuleFailed, "d", true), "[]", "[]"},
		"none is left":               {open(sample{}, alert.RuleFailed, "d", false), "[]", "[{failed d}]"},
		"blocked":                    {lane(laneSample{Blocked: 1}), "[{blocked_keys d}]", "[]"},
		"blocked by what is told":    {told(1, 7), "[]", "[]"},
		"blocked by another failure": {told(1, 8), "[{blocked_keys d}]", "[]"},
		"told, and open already":     {open(told(1, 7), alert.RuleBlockedKeys, "d", false), "[]", "[]"},
		"told, and blocked no more":  {open(told(0, 0), alert.RuleBlockedKeys, "d", false), "[]", "[{blocked_keys d}]"},
		"waiting":                    {lane(laneSample{Waiting: 1}), "[{waiting_keys d}]", "[]"},
		"waits no more":              {open(lane(laneSample{}), alert.RuleWaitingKeys, "d", false), "[]", "[{waiting_keys d}]"},
		"held, and waiting":          {open(lane(laneSample{Waiting: 1, Held: true}), alert.RuleWaitingKeys, "d", false), "[]", "[]"},
		"paused for maintenance":     {lane(laneSample{Held: true, PausedSeconds: 4*3600 - 1}), "[]", "[]"},
		"paused, and forgotten":      {lane(laneSample{Held: true, PausedSeconds: 4*3600 + 1}), "[{paused d}]", "[]"},
		"resumed":                    {open(lane(laneSample{}), alert.RulePaused, "d", false), "[]", "[{paused d}]"},
		"unserved, and no lag":       {sample{Unserved: []unservedSample{{"d", 3}}, Lanes: lane(laneSample{LagSeconds: 601}).Lanes}, "[{unserved d}]", "[]"},
		"served":                     {open(sample{}, alert.RuleUnserved, "d", false), "[]", "[{unserved d}]"},
		"routes still differ":        {open(sample{}, alert.RuleRoutesChanged, "db", false), "[]", "[]"},
		"a refused reload":           {sample{Refused: []refusedSample{{Relay: "r1", Error: "no url"}}}, "[{reload_refused r1}]", "[]"},
		"a corrected one":            {open(sample{}, alert.RuleReloadRefused, "r1", false), "[]", "[{reload_refused r1}]"},
		"relays differ":              {sample{Differ: []Difference{{Destination: "d", Secrets: true, Relays: [][]string{{"a", "c"}, {"b"}}}}}, "[{relays_differ d}]", "[]"},
		"one relay is refused":       {sample{Refusals: []Refusal{{Destination: "d", Relays: []string{"b"}, Error: "401 Unauthorized"}}}, "[{relay_refused d}]", "[]"},
		"it is accepted again":       {open(sample{}, alert.RuleRelayRefused, "d", false), "[]", "[{relay_refused d}]"},
		"they agree":                 {open(sample{}, alert.RuleRelaysDiffer, "d", false), "[]", "[{relays_differ d}]"},
		"the archive has run":        {sample{Database: "db", at: now, Archive: &archiveSample{At: now.Add(-47 * time.Hour)}}, "[]", "[]"},
		"the archive has not":        {sample{Database: "db", at: now, Archive: &archiveSample{At: now.Add(-49 * time.Hour)}}, "[{archive_overdue db}]", "[]"},
		"it accepts nothing":         {sample{Failing: []failingSample{{Destination: "d", Seconds: 700}}, Lanes: lane(laneSample{LagSeconds: 601, Waiting: 1}).Lanes}, "[{failing d}]", "[]"},
		"and that is misconfigured":  {sample{Failing: []failingSample{{Destination: "d"}}, Misconfigured: []failingSample{{Destination: "d"}}}, "[{misconfigured d}]", "[]"},
		"it accepts again":           {open(lane(laneSample{}), alert.RuleFailing, "d", false), "[]", "[{failing d}]"},
		"it is held":                 {open(lane(laneSample{Held: true}), alert.RuleFailing, "d", false), "[]", "[]"},
		"parked":                     {sample{Database: "db", Parked: &parkedSample{Count: 1}}, "[{parked db}]", "[]"},
	} {
		hold, ended := c.seen.conditions(limits, func(last time.Time) time.Time { return last.Add(48 * time.Hour) })
		subjects := make([]subject, 0)
		for _, h := range hold {
			subjects = append(subjects, h.subject)
		}
		testkit.Equal(t, name+": holds", fmt.Sprint(subjects), c.hold)
		over := make([]subject, 0)
		for _, e := range ended {
			over = append(over, e.subject)
		}
		testkit.Equal(t, name+": ended", fmt.Sprint(over), c.ended)
	}
	// What is alerted when it has lasted for a while began before that.
	for _, l := range []laneSample{{LagSeconds: 3600}, {Waiting: 1, WaitingSeconds: 3600}, {Held: true, PausedSeconds: 5 * 3600}, {Blocked: 1, BlockedSeconds: 3600}} {
		hold, _ := new(sample{Database: "db", Lanes: []laneSample{l}}).conditions(limits, nil)
		if len(hold) != 1 || hold[0].age < time.Hour {
			t.Errorf("began not before it was alerted: %+v", hold)
		}
	}
	pinned := sample{Database: "db", at: now, Archive: &archiveSample{At: now.Add(-49 * time.Hour)}}
	testkit.Must(t, json.Unmarshal([]byte(`[{"kind": "prepared", "seconds": 3600}]`), &pinned.VacuumBlockers))
	hold, _ := pinned.conditions(limits, func(last time.Time) time.Time { return last.Add(48 * time.Hour) })
	if len(hold) != 2 || hold[0].age != time.Hour || hold[1].age != time.Hour {
		t.Errorf("began not before it was alerted: %+v", hold)
	}
	differ := Difference{Destination: "d", Secrets: true, Relays: [][]string{{"a", "c"}, {"b"}}}
	testkit.Equal(t, "found", differ.String(), "other secrets at b than at a and c")
	// A storm begins with the third death and ends when a window has passed without one.
	for deaths, want := range map[int]string{0: "0 1", 1: "0 0", 2: "0 0", 3: "1 0"} {
		s := open(sample{Database: "db"}, alert.RuleRescueStorm, "db", false)
		s.Rescues.Relays = deaths
		hold, ended := s.conditions(limits, nil)
		if got := fmt.Sprint(len(hold), len(ended)); got != want {
			t.Errorf("%d deaths: %s, want %s", deaths, got, want)
		}
	}
}
