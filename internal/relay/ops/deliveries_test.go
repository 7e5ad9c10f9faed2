package ops

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// Whatever a filter asks, a page reads a bounded part of the table, and continuing from page to
// page finds all that match.
func TestListsAreBounded(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "default", "other")
	db.Exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference)
		SELECT CASE WHEN i % 10000 = 7 THEN 'rare' ELSE 't' END, '{}', 'k' || i, CASE WHEN i % 10000 = 8 THEN 'rare' END, CASE WHEN i % 10000 = 9 THEN 'rare' END
		FROM generate_series(1, 30000) i`)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now(), last_reason = CASE WHEN event_id % 10000 = 6 THEN 'timeout' END`)
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', delivered_at = NULL WHERE event_id % 10000 = 5`)
	db.Exec(`UPDATE outbox_delivery SET status = 'pending', delivered_at = NULL WHERE event_id % 10000 = 4`)
	outbox := New(db.Pool)
	for name, c := range map[string]struct {
		filter DeliveryFilter
		want   string // a condition
		pages  bool   // several: no index leads there
	}{
		"type":                 {DeliveryFilter{Type: "rare"}, `event_id % 10000 = 7`, true},
		"key":                  {DeliveryFilter{OrderingKey: "rare"}, `event_id % 10000 = 8`, true},
		"reference":            {DeliveryFilter{Related: "rare", Destination: "other"}, `event_id % 10000 = 9 AND destination = 'other'`, true},
		"reason":               {DeliveryFilter{Reason: "timeout", Status: "delivered"}, `event_id % 10000 = 6`, true},
		"failed":               {DeliveryFilter{Status: "failed"}, `event_id % 10000 = 5`, false},
		"failed there":         {DeliveryFilter{Status: "failed", Destination: "other"}, `event_id % 10000 = 5 AND destination = 'other'`, false},
		"pending":              {DeliveryFilter{Status: "pending"}, `event_id % 10000 = 4`, false},
		"pending, of a type":   {DeliveryFilter{Status: "pending", Type: "t", Destination: "default"}, `event_id % 10000 = 4 AND destination = 'default'`, false},
		"parked":               {DeliveryFilter{Status: "pending", Parked: true}, `false`, false},
		"before any":           {DeliveryFilter{Until: time.Now().Add(-time.Hour)}, `false`, true},
		"lately, without more": {DeliveryFilter{Since: time.Now().Add(2 * time.Hour), Type: "none"}, `false`, false},
	} {
		c.filter.Limit, c.filter.Among = 5, 10_000
		var got []string
		searched := 0
		for {
			page, err := outbox.Deliveries(t.Context(), c.filter)
			relaytest.Must(t, err)
			for _, d := range page.Deliveries {
				got = append(got, fmt.Sprint(d.EventID, d.Destination, d.IdempotencyKey))
			}
			if page.Searched != nil {
				searched++
			}
			if page.Next == nil {
				break
			}
			c.filter.After = *page.Next
		}
		want := relaytest.Rows[string](db, `SELECT event_id || destination || 'k' || event_id FROM outbox_delivery WHERE `+c.want+` ORDER BY event_id DESC, destination`)
		if !slices.Equal(got, want) || (searched > 0) != c.pages {
			t.Errorf("%s: after %d pages that were not full got %q, want %q", name, searched, got, want)
		}
	}
}

// Each window reads its source along its index, whether or not the table was analysed.
func TestPlansOfLists(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	db.Fill(30_000, 60)
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', delivered_at = NULL WHERE event_id % 50 = 7`)
	filter := DeliveryFilter{Type: "t*", Reason: "x", OrderingKey: "1", Related: "r", Since: time.Now(), Until: time.Now()}
	for _, analysed := range []bool{false, true} {
		if analysed {
			db.Exec(`VACUUM ANALYZE`)
		}
		for from, index := range map[source]string{
			allDeliveries: "outbox_delivery_pkey", failedDeliveries: "outbox_delivery_aside", parkedDeliveries: "outbox_delivery_aside", pendingDeliveries: "outbox_delivery_",
		} {
			plan := planOfWindow(t.Context(), db, from, filter)
			if !strings.Contains(plan, index) || !strings.Contains(plan, "using outbox_pkey on outbox o") || strings.Contains(plan, "Seq Scan on outbox") {
				t.Errorf("%s, analysed %t:\n%s", index, analysed, plan)
			}
		}
	}
}

func planOfWindow(ctx context.Context, db *relaytest.Database, from source, filter DeliveryFilter) string {
	args := []any{5000, 20_000, ""}
	if from != allDeliveries {
		args = append(args, []string{"default"})
	}
	where, args := filter.conditions(args)
	args = append(args, 50)
	tx := db.Begin()
	_, err := tx.Exec(ctx, pinPlans)
	relaytest.Must(db, err)
	plan := relaytest.PlanOf(db, tx, fmt.Sprintf(listWindow, from)+where+fmt.Sprintf(endOfWindow, len(args)), args...)
	relaytest.Must(db, tx.Rollback(ctx))
	return plan
}
