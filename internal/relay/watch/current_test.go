package watch

import (
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Between two looks the open alerts are shown as they are by now: without those that are over, and
// with the numbers of now. Nothing of that is written, which the next look does.
func TestCurrentAlertsAreThoseOfNow(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	current := func() (all []string) {
		t.Helper()
		open, err := alert.Open(t.Context(), db.Pool)
		relaytest.Must(t, err)
		list, err := Current(t.Context(), db.Pool, open)
		relaytest.Must(t, err)
		for _, a := range list {
			all = append(all, a.Rule)
		}
		slices.Sort(all)
		return all
	}
	db.Exec(`INSERT INTO outbox_alert (rule, subject, opened_at) VALUES ('archive_overdue', current_database(), now()), ('disk_full', 'db', now())`)
	testkit.Equal(t, "before any look", current(), []string{alert.RuleArchive, "disk_full"})
	head := keyedBehind(db, "k", "2098-01-01", 1, time.Hour)
	db.Exec(`DELETE FROM outbox_route`)
	db.Insert(1, "parked")
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	w.ArchiveDue = func(time.Time) time.Time { return time.Now().Add(-time.Hour) }
	look(t, w)
	db.Exec(`UPDATE outbox_delivery SET status = 'discarded', blocked_by = NULL WHERE event_id >= $1 AND destination <> ''`, head)
	all := []string{alert.RuleArchive, "disk_full", alert.RuleParked, alert.RuleWaitingKeys}
	testkit.Equal(t, "of a look that is as good as new", current(), all)
	db.Exec(`UPDATE outbox_watch SET watched_at = watched_at - interval '20 seconds'`)
	testkit.Equal(t, "later", current(), []string{alert.RuleArchive, "disk_full", alert.RuleParked})
	db.Insert(2, "more")
	open, err := alert.Open(t.Context(), db.Pool)
	relaytest.Must(t, err)
	list, err := Current(t.Context(), db.Pool, open)
	relaytest.Must(t, err)
	for _, a := range list {
		if a.Rule == alert.RuleParked && a.Detail[:8] != "3 parked" {
			t.Errorf("the alert says %q", a.Detail)
		}
	}
	db.Exec(`UPDATE outbox_watch SET archived_at = now()`)
	testkit.Equal(t, "the archive has run", current(), []string{"disk_full", alert.RuleParked})
	testkit.Equal(t, "what is stored", relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert WHERE resolved_at IS NULL`), len(all))
}
