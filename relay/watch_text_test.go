package relay

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/alert"
)

// No condition counts one of many, or names an event that is not known.
func TestConditionTextsAreComplete(t *testing.T) {
	t.Parallel()
	defect := regexp.MustCompile(`event 0\b|\b1 (deliveries|attempts|events|keys|relays|sessions|rows)\b|\b1 (more hold|keys wait)\b|: *[.;:]|: *$|  |First\.|holds \.|""`)
	now := time.Now()
	limits := alert.Config{}.WithDefaults()
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
