package ops_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// An event says where it is until all its deliveries have rows: not taken, in whose hand, half
// settled. Operators' commands leave it alone and say so.
func TestEventThatIsNotRouted(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "default", "second")
	db.Insert(3, "e")
	outbox := ops.New(db.Pool)
	want := func(id int64, texts ...string) {
		t.Helper()
		report, err := outbox.Event(t.Context(), id)
		relaytest.Must(t, err)
		var got []string
		for _, w := range report.Explain().Waits {
			text, _, _ := strings.Cut(w.Text, " since ")
			_, after, _ := strings.Cut(w.Text, " (range ")
			got = append(got, strings.TrimSpace(w.Destination+" "+w.Cause+": "+text+" "+after))
		}
		if !slices.Equal(got, texts) {
			t.Errorf("event %d waits for %q, want %q", id, got, texts)
		}
	}
	want(1, "untaken: not yet routed: no relay has taken it yet; no relay is running; start one: outbox-relay run")
	db.Exec(`INSERT INTO outbox_relay (name, version, heartbeat_at, quarantined) VALUES ('copy', 'v', now() + interval '1 hour', 'a copy')`)
	want(1, "untaken: not yet routed: no relay has taken it yet; the relays that run are quarantined and take nothing; see: outbox-relay identity show")
	db.Exec(`INSERT INTO outbox_relay (name, version, heartbeat_at) VALUES ('a', 'v', now() + interval '1 hour')`)
	want(1, "untaken: not yet routed: no relay has taken it yet")

	check := func(named, discarded int64) {
		t.Helper()
		s := ops.Selection{EventIDs: []int64{1, 2, 99}}
		for _, name := range []string{"replay", "retry", "discard"} {
			_, b, err := outbox.Preview(t.Context(), ops.Order{Action: name, Selection: s})
			relaytest.Must(t, err)
			if b.NotRouted != named || b.Unknown != 1 || !slices.Equal(b.UnknownIDs, []int64{99}) {
				t.Errorf("%s: %+v", name, b)
			}
		}
		_, b, err := outbox.Preview(t.Context(), ops.Order{Action: "discard", Selection: ops.Selection{Destination: "default"}})
		relaytest.Must(t, err)
		if b.NotRouted != discarded {
			t.Errorf("%+v", b)
		}
	}
	aged := func(age string) {
		t.Helper()
		db.Exec(`ALTER TABLE outbox DISABLE TRIGGER outbox_is_immutable; UPDATE outbox SET created_at = now() - interval '` + age + `'; ALTER TABLE outbox ENABLE TRIGGER outbox_is_immutable`)
	}
	aged("-1 hour") // however slow this machine is, they are younger than a second
	check(2, 0)
	aged("1 hour")
	check(2, 3)
	if left, err := outbox.Undelivered(t.Context()); err != nil || left.Events != 0 {
		t.Errorf("%+v, %v", left, err)
	}

	idle := func() (list []bool) {
		t.Helper()
		relays, err := outbox.Relays(t.Context())
		relaytest.Must(t, err)
		for _, r := range relays {
			list = append(list, r.Idle)
		}
		return list
	}
	testkit.Equal(t, "idle", idle(), []bool{true, true})
	r, err := intake.TakeRange(t.Context(), db.Pool, 2, intake.Terms{Events: 10}, false)
	relaytest.Must(t, err)
	want(1, "in_hand: in the hand of relay 2 a 2)")
	testkit.Equal(t, "idle with events in hand", idle(), []bool{true, false})
	check(2, 0)
	settle := func(ended bool, deliveries ...intake.NewRow) {
		t.Helper()
		for i := range deliveries {
			deliveries[i].Range, deliveries[i].Status = r.Ref(), intake.Delivered
		}
		s := intake.NewRows{Relay: 2, Ranges: []intake.RangeRef{r.Ref()}, Deliveries: deliveries}
		if ended {
			s.Ended = s.Ranges
		}
		_, err := intake.SettleRanges(t.Context(), db.Pool, s)
		relaytest.Must(t, err)
	}
	settle(false, intake.NewRow{EventID: 1, Destination: "second"}, intake.NewRow{EventID: 3, Destination: ""})
	want(1, "in_hand: in the hand of relay 2 a 2); these have their delivery already: second")
	want(3, "in_hand: in the hand of relay 2 a 2); these have their delivery already: no destination (parked)")
	db.Exec(`DELETE FROM outbox_relay WHERE name = 'a'`)
	want(2, "in_hand: in the hand of relay 2, which is gone, 2); another relay takes it over; the relays that run are quarantined and take nothing; see: outbox-relay identity show")
	settle(true, intake.NewRow{EventID: 1, Destination: "default"}, intake.NewRow{EventID: 2, Destination: "default"})
	want(1)
	want(2)
	check(0, 0)
}
