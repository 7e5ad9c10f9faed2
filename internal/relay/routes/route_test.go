package routes

import (
	"fmt"
	"slices"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// The configuration is compared with what the database does, so both must understand a pattern
// alike.
func TestRouteMatchesAsTheDatabaseDoes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	patterns := []string{"*", "a", "a*", "*a", "*a*", "a*a", "a*b*c", "**", "a**b", "*.b.*", "a_c", "a%c", `a\c`, "a*bc*c", "abc*abc", "A*"}
	types := []string{"a", "aa", "ab", "abc", "a.b.c", "axbyc", "abcabc", "a_c", "axc", "a%c", `a\c`, "abcc", "abcbc", "b", "ba", "A"}
	db.Exec(`DELETE FROM outbox_route`)
	db.Exec(`INSERT INTO outbox_route SELECT p, 'to-' || i FROM unnest($1::text[]) WITH ORDINALITY AS u (p, i)`, patterns)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT t, '{}', t FROM unnest($1::text[]) t`, types)
	for _, eventType := range types {
		taken := relaytest.Rows[string](db, `SELECT destination FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id WHERE event_type = $1`, eventType)
		for i, pattern := range patterns {
			database := slices.Contains(taken, fmt.Sprint("to-", i+1))
			if got := (Route{Event: pattern}).Matches(eventType); got != database {
				t.Errorf("%s matches %s: %v, in the database %v", pattern, eventType, got, database)
			}
		}
	}
}

func TestRouteDifferences(t *testing.T) {
	t.Parallel()
	before := parse("* a", "t b")
	for want, next := range map[string][]Route{
		"[]":                            {{Event: "*", To: []string{"a"}}, {Event: "t", To: []string{"b"}}},
		"[routes: 1 added, 0 removed]":  {{Event: "*", To: []string{"a"}}, {Event: "t", To: []string{"a", "b"}}},
		"[routes: 2 added, 2 removed]":  parse("*.x a", "t c"),
		"[routes: 0 added, 2 removed]":  nil,
		"[routes: 10 added, 2 removed]": {{Event: "u", To: []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}}},
	} {
		if got := fmt.Sprint(Differences(before, next)); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
