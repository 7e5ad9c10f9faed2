package session

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// A relay that is asleep is a row without a session. Who runs its process writes the heartbeat,
// with [BeatAsleep], and listens: a notification wakes the relay, which resumes its row. Anything
// that its database may want of it wakes it too, so nothing is done for it while it sleeps.

// AsleepInterval is the time between two beats of a relay that is asleep. Producers notify for
// longer after each, and others believe for longer that it lives ([pg.IsAlive]).
const AsleepInterval = 25 * time.Second

// maySleep asks the relay to fall asleep if there has been nothing to do for long.
func (s *Session) maySleep(ctx context.Context, on *standing, now time.Time) error {
	if s.SleepAfter == 0 || on.conn == nil || !on.listening || s.Config.Pooler.Session != nil {
		return nil
	}
	if on.asked || !s.Idle() {
		s.busyAt, on.asked = now, false
	}
	if now.Sub(s.busyAt) < s.SleepAfter {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	relayID, _ := s.Presence.Current()
	work, err := rows.Value[bool](ctx, on, "ask whether anything is to be done", HasWork, relayID)
	if err != nil {
		return fmt.Errorf("fall asleep: %w", err)
	}
	if s.busyAt = now; !work {
		s.FallAsleep(relayID, on.schema)
	}
	return nil
}
