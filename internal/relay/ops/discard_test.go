package ops_test

import (
	"errors"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What was discarded by mistake can be brought back for as long as what was delivered.
func TestDiscardedIsKeptFromItsDiscard(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	outbox := ops.New(db.Pool)
	_, err := outbox.AcceptIdentity(t.Context(), "")
	relaytest.Must(t, err)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at) SELECT 't', '{}', i, now() - interval '40 days' FROM generate_series(1, 2) i`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '39 days', last_attempt_at = now() - interval '39 days'`)
	db.Exec(`UPDATE outbox_delivery SET status = 'failed' WHERE event_id = 1`)
	_, err = outbox.Discard(t.Context(), ops.Selection{EventIDs: []int64{1}}, nil)
	relaytest.Must(t, err)
	db.Exec(`UPDATE outbox_identity SET database_oid = 1`)
	_, err = outbox.DiscardQuarantined(t.Context(), "", nil)
	relaytest.Must(t, err)
	testkit.Equal(t, "discarded", relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'discarded'`), 2)
	done, err := archive.Job{DB: db.Pool, Keep: archive.Retention{ArchiveAfter: 30 * 24 * time.Hour}}.Run(t.Context())
	if err != nil || done.Events != 0 {
		t.Errorf("%+v, %v", done, err)
	}
}

// Once another command has accepted the database and relays work on it, their deliveries are left
// alone.
func TestDiscardQuarantinedEndsWhereRelaysWork(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	outbox := ops.New(db.Pool)
	_, err := outbox.AcceptIdentity(t.Context(), "")
	relaytest.Must(t, err)
	db.Insert(3500, "original")
	db.Exec(`UPDATE outbox_identity SET database_oid = 1`)
	calls := 0
	b, err := outbox.DiscardQuarantined(t.Context(), "", func(ops.Bulk) {
		if calls++; calls > 1 {
			return
		}
		_, err := ops.New(db.Pool).AcceptIdentity(t.Context(), "")
		relaytest.Must(t, err)
		db.Exec(`INSERT INTO outbox_relay (name, version) VALUES ('r', 'v')`)
	})
	if !errors.Is(err, identity.ErrInUse) || b.Done != 1000 || calls > 2 {
		t.Errorf("%d batches: %+v, %v", calls, b, err)
	}
	testkit.Equal(t, "the audit", relaytest.Row[string](db, `SELECT state || ' ' || done FROM outbox_audit WHERE action = 'discard'`), "failed 1000")
}
