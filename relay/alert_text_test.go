package relay

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"time"
)

// No alert names an event that it does not know, counts one of many, or has a colon with nothing behind it, whatever of
// it is known.
func TestAlertTextsAreComplete(t *testing.T) {
	t.Parallel()
	defect := regexp.MustCompile(`event 0\b|\b1 (deliveries|attempts|events|keys|relays|sessions|rows)\b|\b1 (more hold|keys wait)\b|: *[.;:]|: *$|  |First\.|holds \.|""`)
	now := time.Now()
	for _, rule := range []string{
		RuleFailed, RuleLag, RuleBreakerOpen, RuleParked, RuleUndelivered, RuleBlockedKeys, RuleWaitingKeys, RuleRescueStorm, RuleHorizonPinned, RuleQuarantined,
		ruleTest, "unknown_rule",
	} {
		for _, count := range []int64{1, 2} {
			for _, event := range []int64{0, 7} {
				for _, err := range []string{"", "500 Internal Server Error"} {
					for _, detail := range []string{"", "1 delivery"} {
						for _, resolved := range []*time.Time{nil, &now} {
							a := Alert{
								Rule: rule, Subject: "shop", Count: count, OpenedAt: now.Add(-time.Hour), FirstEventID: event, FirstError: err, Detail: detail,
								ResolvedAt: resolved,
							}
							if found := defect.FindString(a.Text()); found != "" {
								t.Errorf("%q in: %s", found, a.Text())
							}
						}
					}
				}
			}
		}
	}
	limits := Alerts{}.withDefaults()
	for _, n := range []int{1, 2, countedTo + 1} {
		s := sample{
			Database: "db", now: now, at: now, Undelivered: &undeliveredSample{Count: n, Event: 7},
			Lanes:  []laneSample{{Destination: "shop", Seconds: 3600, Event: 7, Blocked: n, BlockedSeconds: 60, BlockedKey: "k", BlockedEvent: 7}},
			Parked: &parkedSample{Count: n, Event: 7, Seconds: 60}, // of an event that is gone
		}
		s.Rescues.Relays = rescueStorm
		prepared := `{"kind": "prepared", "name": "p", "user": "u", "seconds": 3600}`
		must(t, json.Unmarshal([]byte("["+strings.TrimPrefix(strings.Repeat(","+prepared, min(n, 3)), ",")+"]"), &s.Holders))
		hold, _ := s.judge(limits)
		if len(hold) != 6 {
			t.Errorf("%d conditions", len(hold))
		}
		for _, c := range hold {
			if found := defect.FindString(c.detail); found != "" {
				t.Errorf("%q in: %s", found, c.detail)
			}
		}
	}
}
