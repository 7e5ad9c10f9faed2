package routes

import (
	"fmt"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// take lets the relay take a range of one event.
func (r *relay) take() (seq int64) {
	r.Helper()
	r.Insert(1, fmt.Sprint("key", relaytest.Row[int](r.Database, `SELECT count(*) FROM outbox`)))
	taken, err := intake.TakeRange(r.Context(), r.keeper.DB, r.relayID, intake.Terms{Events: 10, Inline: 1 << 20}, false)
	relaytest.Must(r, err)
	if taken.Found != intake.Taken {
		r.Fatalf("took nothing: %s", taken.Found)
	}
	return taken.Seq
}

func end(db *relaytest.Database, seq int64) {
	db.Exec(`UPDATE outbox_range SET ended_at = now() WHERE seq = $1`, seq)
}

func (r *relay) follow(keeps bool, want string) {
	r.Helper()
	relaytest.Must(r, r.keeper.Follow(r.Context(), r.relayID))
	testkit.Equal(r, "it keeps routes", r.keeper.Keeps(), keeps)
	wantStored(r.Database, want)
}

// The routes of a relay that died or stops stay until each range that was open then has ended:
// another relay may have to route its events. Later ranges keep none, and a reload removes its own
// at once.
func TestOpenRangesKeepRoutes(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "history")
	first, second, third := registered(db, "first"), registered(db, "second"), registered(db, "third")
	first.apply("* a")
	second.apply("* b", "* old")
	third.apply("* c")
	of1 := first.take()
	db.Exec(`DELETE FROM outbox_relay WHERE id = $1`, first.relayID)
	second.follow(true, "* a, * b, * c, * old")
	of2 := second.take()
	second.apply("* b")
	wantStored(db, "* a, * b, * c")
	relaytest.Must(t, third.keeper.Withdraw(t.Context(), third.relayID))
	second.follow(true, "* a, * b, * c")
	second.take()
	end(db, of1)
	second.follow(true, "* b, * c")
	end(db, of2)
	second.follow(false, "* b")
}

// A relay that others have taken for dead may take one more range by its routes. These stay until
// that one has ended, too, whoever has it by then.
func TestRangesOfRelaysTakenForDeadKeepRoutes(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "history")
	frozen, other := registered(db, "frozen"), registered(db, "other")
	frozen.apply("* a")
	other.apply("* b")
	first := frozen.take()
	db.Exec(`DELETE FROM outbox_relay WHERE id = $1`, frozen.relayID)
	other.follow(true, "* a, * b")
	second := frozen.take()
	end(db, first)
	other.follow(true, "* a, * b")
	db.Exec(`UPDATE outbox_range SET relay_id = $1 WHERE seq = $2`, other.relayID, second)
	other.follow(true, "* a, * b")
	end(db, second)
	other.follow(false, "* b")
}
