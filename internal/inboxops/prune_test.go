package inboxops_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestPrune(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	for _, receiver := range []string{"shipping", "billing"} {
		for id, state := range []string{succeeded, ignored, failed, pending} {
			if receiver == "billing" {
				id += 10
			}
			d.eventOf(receiver, "finance", id+1, state)
		}
	}
	d.exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('shipping', 'finance', 'of the middleware', 'succeeded')`)
	d.exec(`UPDATE inbox_events SET received_at = now() - interval '90 days'`)
	d.exec(`UPDATE processed_events SET received_at = now() - interval '90 days'`)
	d.event(5, succeeded) // of today
	p := inboxops.Prune{Receiver: "shipping", OlderThan: 48 * time.Hour}
	preview := func(removed, announced int64) {
		t.Helper()
		if got, err := d.ops.PreviewPrune(t.Context(), p); err != nil || got != (inboxops.Pruned{Removed: removed, Announced: announced}) {
			t.Errorf("the preview is %+v, %v", got, err)
		}
	}
	prune := func(removed, announced int64) {
		t.Helper()
		var last inboxops.Pruned
		got, err := d.ops.Prune(t.Context(), p, func(so inboxops.Pruned) { last = so })
		if err != nil || got != (inboxops.Pruned{Removed: removed, Announced: announced}) || last != got {
			t.Errorf("pruned %+v, %v", got, err)
		}
	}
	preview(0, 3)
	testkit.Equal(t, "a preview has announced something", d.count("SELECT count(*) FROM inbox_forgotten"), 0)
	prune(0, 3)
	d.exec("UPDATE inbox_forgotten SET announced_at = announced_at - interval '1 hour'")
	preview(3, 0)
	prune(3, 0)
	testkit.Equal(t, "events left", d.ids("receiver = 'shipping'"), "345")
	testkit.Equal(t, "events of another receiver", d.count("SELECT count(*) FROM inbox_events WHERE receiver = 'billing'"), 4)
	p.Receiver = ""
	preview(0, 2)

	p.OlderThan = 23 * time.Hour
	if got, err := d.ops.Prune(t.Context(), p, nil); err == nil || !strings.Contains(err.Error(), "cannot be forgotten after") {
		t.Errorf("%+v, %v", got, err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	cancel(stopped)
	if _, err := d.ops.Prune(ctx, inboxops.Prune{OlderThan: 48 * time.Hour}, nil); !errors.Is(err, stopped) {
		t.Error(err)
	}
}
