package take

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
)

// beyondEvery is how long the claimer waits between two searches for events beyond a cut.
const beyondEvery = 10 * time.Millisecond

// PassCut makes rows of events that came after a difference that was cut, for destinations that
// have room. A large insert for one destination would hold up those of all others otherwise.
func (t *Taker) PassCut(ctx context.Context, relayID int32) error {
	if !t.cut || t.Lanes.Configured() < 2 || time.Since(t.passedAt) < beyondEvery {
		return nil
	}
	t.passedAt = time.Now()
	err := t.passCut(ctx, relayID)
	if pg.IsOfRows(err) { // the take brings them
		t.Failed("pass a cut", err)
		t.passedAt = t.passedAt.Add(unreadableAgain)
		return nil
	}
	return err
}

func (t *Taker) passCut(ctx context.Context, relayID int32) error {
	found, err := intake.FindBeyond(ctx, t.DB)
	if err != nil || len(found.Events) == 0 {
		return err
	}
	if err := t.refresh(ctx, relayID, &intake.Range{Routes: found.Routes, Destinations: found.Destinations}); err != nil {
		return err
	}
	var list []intake.BeyondRow
	targets := t.newTargets()
	for i := range found.Events {
		e := &found.Events[i]
		if e.EventType == nil || intake.BrokenRule(e) != "" {
			continue // the take settles it
		}
		for _, to := range t.routes.Destinations(*e.EventType) {
			if at := targets.of(to); at.reason == "" && at.room > 0 {
				at.room--
				list = append(list, intake.BeyondRow{EventID: e.ID, Destination: to, Bytes: e.PayloadBytes})
			}
		}
	}
	if len(list) == 0 {
		return nil
	}
	at, written, err := intake.WriteBeyond(ctx, t.DB, relayID, found.Seq, list)
	if err != nil || !written {
		return err
	}
	for _, row := range list {
		l := t.Lanes.Get(row.Destination)
		l.NoteDue(at)
		t.Lanes.Engage(l)
	}
	t.Agenda.At(agenda.CauseScan, t.passedAt)
	return nil
}
