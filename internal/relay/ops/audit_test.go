package ops

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const auditLines = `SELECT concat_ws(' ', actor, origin, action, state, destination, event_id, selection->>'destination', matched, done, detail) FROM outbox_audit ORDER BY id`

// Every change leaves one entry that says who, through what, and how much; a call that changes
// nothing leaves none.
func TestAudit(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "k")
	db.Settled("failed", "event_id < 3")
	ctx := t.Context()
	ann := New(db.Pool).As(Actor{Name: "ann", Origin: OriginPage})
	for range 2 {
		_, err := ann.Pause(ctx, "default", "maintenance")
		relaytest.Must(t, err)
	}
	_, err := New(db.Pool).As(Actor{Name: "bob@host"}).Resume(ctx, "default", true)
	relaytest.Must(t, err)
	db.Exec(`UPDATE outbox_destination SET breaker = 'open', breaker_opened_at = now(), breaker_until = now()`)
	_, err = ann.ResetBreaker(ctx, "default")
	relaytest.Must(t, err)
	_, err = ann.Replay(ctx, Selection{Destination: "default"}, 0, nil)
	relaytest.Must(t, err)
	_, err = ann.Discard(ctx, Selection{EventIDs: []int64{3}}, nil)
	relaytest.Must(t, err)
	content, err := ann.Reveal(ctx, 2)
	relaytest.Must(t, err)
	if *content.Event.Payload != `{"n": 1}` || content.Event.Headers == nil {
		t.Errorf("revealed %q", *content.Event.Payload)
	}
	if hidden, err := ann.Event(ctx, 2); err != nil || hidden.Event.Payload != nil || hidden.Event.PayloadBytes != 8 {
		t.Errorf("not revealed: %+v, %v", hidden, err)
	}
	if _, err := ann.Pause(ctx, "nowhere", ""); !errors.Is(err, ErrUnknownDestination) {
		t.Error(err)
	}
	if _, err := ann.Reveal(ctx, 99); !errors.As(err, new(UnknownEvent)) {
		t.Error(err)
	}
	want := []string{
		"ann page pause done default 0 0 maintenance",
		"bob@host cli resume done default 0 0 maintenance",
		"ann page reset_breaker done default 0 0",
		"ann page replay done default default 0 2",
		"ann page discard done 0 1",
		"ann page reveal_payload done 2 0 0 login postgres",
	}
	if got := relaytest.Rows[string](db, auditLines); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	list, err := ann.Audit(ctx, 0, 2)
	relaytest.Must(t, err)
	if len(list) != 2 || list[0].Action != "reveal_payload" || *list[0].EventID != 2 || list[1].Action != "discard" {
		t.Errorf("%+v", list)
	}
	if older, err := ann.Audit(ctx, list[1].ID, 50); err != nil || len(older) != 4 {
		t.Errorf("%+v, %v", older, err)
	}
}

// A change and its entry commit together: where the entry cannot be written, nothing changes.
func TestAuditIsPartOfTheChange(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	db.Settled("failed", "true")
	db.Refuse("UPDATE OF done ON outbox_audit", "true")
	if _, err := New(db.Pool).Replay(t.Context(), Selection{Destination: "default"}, 0, nil); err == nil {
		t.Error("replayed without an audit")
	}
	db.Exec(`CREATE TRIGGER refuse_too BEFORE INSERT ON outbox_audit FOR EACH ROW EXECUTE FUNCTION refuse()`)
	if _, err := New(db.Pool).Pause(t.Context(), "default", ""); err == nil {
		t.Error("paused without an audit")
	}
	if got := relaytest.Row[string](db, `SELECT (SELECT status FROM outbox_delivery) || (SELECT count(*) FROM outbox_destination WHERE paused)`); got != "failed0" {
		t.Errorf("it has changed: %s", got)
	}
}

// An operation that was interrupted, or whose process was killed, continues under its number, once.
func TestOperationGoesOn(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2500, "k")
	db.Settled("failed", "true")
	ctx, interrupt := context.WithCancel(t.Context())
	outbox := New(db.Pool).As(Actor{Name: "ann", Origin: OriginAPI})
	order := Order{Action: "replay", Selection: Selection{Destination: "default", Rate: new(int64(0))}, Matched: 2500}
	id, order, err := outbox.Begin(ctx, order)
	relaytest.Must(t, err)
	if _, err := outbox.TakeUp(ctx, id); !errors.Is(err, ErrNotResumable) {
		t.Errorf("a running operation was taken up: %v", err)
	}
	if b, err := outbox.Work(ctx, id, order, func(Bulk) { interrupt() }); err == nil || b.Done != 1000 {
		t.Errorf("%+v, %v", b, err)
	}
	entry, err := outbox.AuditEntry(t.Context(), id)
	relaytest.Must(t, err)
	if entry.State != "interrupted" || entry.Done != 1000 || entry.Matched != 2500 || !entry.Resumable() {
		t.Errorf("%+v", entry)
	}
	// As after SIGKILL.
	db.RewriteAudit(`state = 'running', updated_at = now() - interval '10 minutes'`)
	again, err := outbox.TakeUp(t.Context(), id)
	relaytest.Must(t, err)
	if _, err := outbox.TakeUp(t.Context(), id); !errors.Is(err, ErrNotResumable) {
		t.Errorf("taken up twice: %v", err)
	}
	if b, err := outbox.Work(t.Context(), id, again, nil); err != nil || b.Done != 1500 {
		t.Errorf("%+v, %v", b, err)
	}
	if got := fmt.Sprint(relaytest.Rows[string](db, auditLines)); got != "[ann api replay done default default 2500 2500 ann api resume_operation done 0 0 operation 1]" {
		t.Error(got)
	}
}

// What continues replays nothing twice, though it has failed again meanwhile, and keeps to the
// limit that was confirmed.
func TestOperationGoesOnWithinItsOrder(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2500, "k")
	db.Settled("failed", "true")
	ctx, interrupt := context.WithCancel(t.Context())
	outbox := New(db.Pool)
	order := Order{Action: "replay", Selection: Selection{Destination: "default", Limit: 2000, Rate: new(int64(0))}, Matched: 2000}
	id, order, err := outbox.Begin(ctx, order)
	relaytest.Must(t, err)
	if b, err := outbox.Work(ctx, id, order, func(Bulk) { interrupt() }); err == nil || b.Done != 1000 {
		t.Errorf("%+v, %v", b, err)
	}
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', last_attempt_at = now() WHERE status = 'pending'`) // the receiver still refuses
	again, err := outbox.TakeUp(t.Context(), id)
	relaytest.Must(t, err)
	if b, err := outbox.Work(t.Context(), id, again, nil); err != nil || b.Done != 1000 {
		t.Errorf("%+v, %v", b, err)
	}
	testkit.Equal(t, "replayed", relaytest.Row[string](db, `SELECT min(event_id) || ' ' || max(event_id) FROM outbox_delivery WHERE status = 'pending'`), "1001 2000")
	// As after SIGKILL behind the last batch.
	db.RewriteAudit(`state = 'running', updated_at = now() - interval '10 minutes'`)
	again, err = outbox.TakeUp(t.Context(), id)
	relaytest.Must(t, err)
	if b, err := outbox.Work(t.Context(), id, again, nil); err != nil || b.Done != 0 {
		t.Errorf("%+v, %v", b, err)
	}
}

// A reason and a name are one line of text that the database takes, and of bounded length.
func TestTextsOfTheAuditAreBounded(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	ann := New(db.Pool).As(Actor{Name: "ann\x00\n" + strings.Repeat("n", 1<<20)})
	p, err := ann.Pause(t.Context(), "default", "a\x00b\n"+strings.Repeat("x", 1<<20))
	if err != nil || len(p.Reason) > plain.MaxBytes || !strings.HasPrefix(p.Reason, "a\ufffdb xx") {
		t.Errorf("%d bytes, %v", len(p.Reason), err)
	}
	if actor := relaytest.Row[string](db, `SELECT actor FROM outbox_audit`); len(actor) > maxActor || !strings.HasPrefix(actor, "ann\ufffd nn") {
		t.Errorf("an actor of %d bytes", len(actor))
	}
}
