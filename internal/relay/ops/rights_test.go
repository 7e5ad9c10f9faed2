package ops_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// The roles of roles.sql are enough for what is asked and done about events that are not routed.
func TestRightsOnUnroutedEvents(t *testing.T) {
	t.Parallel()
	_, db := relaytest.ServeCopy(t, localpg.Options{}) // roles belong to the whole server
	db.Exec(migrations.Roles())
	db.Route()
	db.Serve("default")
	db.Insert(3, "e")
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'default'); UPDATE outbox_watch SET sample = '{"terms": {"lag_over": 600}}'`)
	as := func(role string) *pgxpool.Pool {
		t.Helper()
		return pgtest.PoolWith(t, db.DSN, func(cfg *pgxpool.Config) {
			cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, `SET ROLE `+role)
				return err
			}
		})
	}
	reader := ops.New(as("outbox_reader"))
	for name, ask := range map[string]func() error{
		"status":      func() error { _, err := reader.Status(t.Context(), ""); return err },
		"event":       func() error { _, err := reader.Event(t.Context(), 1); return err },
		"relays":      func() error { _, err := reader.Relays(t.Context()); return err },
		"untaken":     func() error { _, err := reader.Untaken(t.Context()); return err },
		"undelivered": func() error { _, err := reader.Undelivered(t.Context()); return err },
		"preview": func() error {
			_, _, err := reader.Preview(t.Context(), ops.Order{Action: "discard", Selection: ops.Selection{EventIDs: []int64{1}}})
			return err
		},
		"tail": func() error {
			tail, err := reader.Tail(t.Context(), ops.TailFilter{})
			if err == nil {
				db.Insert(1, "tailed")
				_, err = tail.Look(t.Context())
			}
			return err
		},
	} {
		if err := ask(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	found, err := reader.Examine(t.Context(), ops.ExamineConfig{})
	relaytest.Must(t, err)
	for _, f := range found.Findings {
		if f.Check == "intake" || f.Check == "events" || f.Check == "identity" {
			t.Errorf("%+v", f)
		}
	}

	pool := as("outbox_relay")
	_, err = intake.PruneRanges(t.Context(), pool, 0)
	relaytest.Must(t, err)
	relay := ops.New(pool)
	_, err = relay.AcceptIdentity(t.Context(), "")
	relaytest.Must(t, err)
	_, err = relay.CreateDeliveries(t.Context())
	relaytest.Must(t, err)
	db.Exec(`UPDATE outbox_intake SET system_identifier = 1`)
	_, err = relay.AcceptIdentity(t.Context(), "")
	relaytest.Must(t, err)
	db.Exec(`UPDATE outbox_identity SET database_oid = 1; DELETE FROM outbox_relay`)
	b, err := relay.DiscardQuarantined(t.Context(), "", nil)
	if err != nil || b.Done != 4 {
		t.Errorf("%+v, %v", b, err)
	}
}
