package outbox_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/outbox"
)

// A producer cannot hold an ordering key for thousands of years, by either API. Relays refuse what plain SQL has let in.
func TestSecurityAvailableAtIsAYearAheadAtMost(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		for _, at := range []time.Time{in(366), in(367), in(400), time.Date(9998, 12, 31, 0, 0, 0, 0, time.UTC)} {
			e := event("k")
			e.OrderingKey, e.AvailableAt = "customer-7", at
			_, err := db.enqueue(e)
			if invalid, ok := errors.AsType[*outbox.ValidationError](err); !ok || invalid.Field != "AvailableAt" || !strings.HasSuffix(invalid.Problem, "at most 365 days from now; insert the event when it is nearer") {
				t.Errorf("%s: %v", at, err)
			}
		}
		equal(t, "events", db.keys(), []string{})
	})
}

// A producer cannot send a header that speaks for the relay, however it is spelt. Relays refuse what plain SQL has let in.
func TestSecurityHeadersOfTheRelayAreRefused(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		for _, name := range []string{
			"Authorization", "authorization", "Cookie", "X-Forwarded-For", "x_forwarded_proto", "X.Real.Ip", "X-Original-Url", "X-Http-Method-Override", "Content-Encoding",
			"Proxy", "Authorization ", "Coo\u212aie",
		} {
			e := event("k")
			e.Headers = map[string]string{"X-Event-Tenant": "finance", name: "evil"}
			_, err := db.enqueue(e)
			if invalid, ok := errors.AsType[*outbox.ValidationError](err); !ok || invalid.Field != "Headers" {
				t.Errorf("%q: %v", name, err)
			}
		}
		equal(t, "events", db.keys(), []string{})
	})
}
