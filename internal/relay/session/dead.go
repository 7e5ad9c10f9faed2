package session

import (
	"cmp"
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// This file says which relays are dead, and when. Each beat looks for them ([Beat]), and the relay
// that finds one takes over from it (store_dead.go). A beat comes each 1 to 1.5 s where another
// relay is registered, so a relay is found
//   - at the next beat after its session is gone (isDisconnected),
//   - at the next beat after its heartbeat is 15 s old, where its session lasts, or one lease old,
//     where it has none, as through a pooler (isSilent),
//   - later where the finder cannot know (serverIsUp, grace).

// isDisconnected is true of a relay r whose session is gone, as when its process or its connection
// ended.
const isDisconnected = `(r.session_pid IS NOT NULL AND NOT ` + pg.HasSession + `)`

// isSilent is true of a relay r whose heartbeat is old, as when it is frozen while the server still
// takes its connection for alive. Without a session, only its heartbeat says that it lives. One
// from the future was written before the clock was put back.
const isSilent = `(greatest(now() - r.heartbeat_at, r.heartbeat_at - now()) > CASE WHEN r.session_pid IS NULL THEN r.lease ELSE interval '15 seconds' END)`

const isDead = `(` + isSilent + ` OR ` + isDisconnected + `)`

// serverIsUp is false in the first seconds of a server, when no relay had time to come back.
const serverIsUp = `pg_postmaster_start_time() NOT BETWEEN now() - interval '3 seconds' AND now()`

const (
	// afterReconnect is how long a relay that was kept from the database believes that others were
	// too, and are no more dead than itself.
	afterReconnect  = 3 * time.Second
	defaultWatchFor = 15 * time.Second
)

// A grace is until when other relays may look dead although they live: what kept this relay from
// the database, or set its clock, has mostly met them too, and they have yet to send a heartbeat.
type grace struct{ silent, disconnected time.Time }

// isOver reports which other relays a beat at the given time may find: those whose heartbeat is
// old, and those whose session is gone.
func (g grace) isOver(now time.Time) (silent, disconnected bool) {
	return !now.Before(g.silent), !now.Before(g.disconnected)
}

// startGrace gives the other relays time after this one has connected.
func (s *Session) startGrace(now time.Time, hadEntered bool) {
	s.extendGrace(now)
	if !hadEntered {
		s.grace.disconnected = time.Time{} // a relay that was not here before lost no connection together with others
	}
}

// extendGrace gives the other relays time after this one was kept from the database.
func (s *Session) extendGrace(now time.Time) {
	s.grace = grace{silent: now.Add(cmp.Or(s.WatchFor, defaultWatchFor)), disconnected: now.Add(afterReconnect)}
}

// rescueDead takes over from the relays that a beat found dead.
func (s *Session) rescueDead(ctx context.Context, e echo) {
	if e.late {
		s.extendGrace(time.Now())
		return
	}
	for _, other := range e.dead {
		s.rescue(ctx, other)
	}
}

// rescue takes over from a dead relay. If that fails, the next beat tries again: a session that
// ended of it would make this relay look dead too.
func (s *Session) rescue(ctx context.Context, other int32) {
	dead, lasting, err := Rescue(ctx, s.Database.Pool, other)
	if err != nil {
		s.Failed("rescue", err)
	}
	if pg.HasCode(err, pg.LockNotAvailable) {
		s.unblock(ctx)
	}
	if !dead {
		return
	}
	s.Config.Log.Warn().Int32("dead_relay_id", other).Msg("rescued the claims of a dead relay")
	s.Rescued(other)
	s.Wake(Requests{Sweep: true, Routes: true})
	if err := endSession(ctx, s.Database.Pool, other, lasting); err != nil && !pg.HasCode(err, pg.LacksPrivilege) {
		s.Failed("end session", err)
	}
}

// unblock ends what may keep the row of a dead relay locked. The next beat tries the rescue again.
func (s *Session) unblock(ctx context.Context) {
	ended, err := endUnread(ctx, s.Database.Pool)
	switch {
	case err != nil && !pg.HasCode(err, pg.LacksPrivilege):
		s.Failed("end statement", err)
	case ended > 0:
		s.Config.Log.Warn().Int("statements", ended).Msg("ended statements of a relay that does not read their answer, as a frozen process")
	}
}
