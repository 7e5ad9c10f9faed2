package relaytest

import (
	"regexp"
	"strings"
	"testing"
)

// Fill adds n deliveries, of which the given share of a hundred is delivered; the rest is pending, some of it in order,
// some of it claimed.
func (db *Database) Fill(n, delivered int) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{}', gen_random_uuid() FROM generate_series(1, $1)`, n)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id % 100 < $1 AND status = 'pending'`, delivered)
	db.Exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id % 100 = 98 AND status = 'pending'`)
	db.Exec(`UPDATE outbox_delivery SET ordering_key = event_id % 1000 WHERE event_id % 10 = 9 AND status = 'pending'`)
}

var big = regexp.MustCompile(`(Scan|using \w+) on (outbox|outbox_delivery|outbox_attempt)( \w+)?$`)

// WantPlan checks that a plan has the given parts, and reads no big table as a whole: neither in a sequential scan, nor
// through an index without a condition.
func WantPlan(t testing.TB, what, plan string, want []string) {
	t.Helper()
	lines := strings.Split(plan, "\n")
	var wrong []string
	for i, line := range lines {
		whole := strings.Contains(line, " using ") && (i+1 == len(lines) || !strings.Contains(lines[i+1], "Index Cond"))
		if big.MatchString(line) && (whole || strings.Contains(line, "Seq Scan")) {
			wrong = append(wrong, line)
		}
	}
	for _, part := range want {
		if !strings.Contains(plan, part) {
			wrong = append(wrong, "missing: "+part)
		}
	}
	if wrong != nil {
		t.Errorf("%s:\n%s\nin\n%s", what, strings.Join(wrong, "\n"), plan)
	}
}
