package relay

import (
	"context"
	"io"
	"net"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A doomedLink ends the connection with the nth message to the database: instead of sending it, or after sending it, so that the server
// does what it says and the answer is lost.
type doomedLink struct {
	nth, sent atomic.Int64
	after     bool
}

func (l *doomedLink) dial(dial func(ctx context.Context, network, address string) (net.Conn, error)) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return doomedConn{conn, l}, nil
	}
}

type doomedConn struct {
	net.Conn
	link *doomedLink
}

func (c doomedConn) Write(b []byte) (int, error) {
	if c.link.sent.Add(1) != c.link.nth.Load() {
		return c.Conn.Write(b)
	}
	if c.link.after {
		_, _ = c.Conn.Write(b) // the connection ends anyway
	}
	_ = c.Close()
	return 0, io.ErrUnexpectedEOF
}

// Whichever message to the database is lost, or whose answer: each event arrives, those of a key in their order.
func TestAnyMessageToTheDatabaseMayFail(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]bool{"the message": false, "its answer": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			failed := 0
			for nth := int64(1); ; nth += int64(testsize.Of(1, 11)) {
				if !deliversDespite(t, &doomedLink{after: after}, nth) {
					break
				}
				failed++
			}
			t.Logf("%d different messages failed", failed)
			if failed == 0 {
				t.Error("nothing failed")
			}
		})
	}
}

// deliversDespite runs a relay whose nth message fails until it has delivered some events, and reports whether it sent as many.
func deliversDespite(t *testing.T, link *doomedLink, nth int64) (reached bool) {
	t.Helper()
	link.nth.Store(nth)
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	cfg := config(db, to(rc.URL))
	cfg.Pool.ConnConfig.DialFunc = link.dial(cfg.Pool.ConnConfig.DialFunc)
	r := start(t, cfg)
	db.InsertKeyed("k", 1, 3)
	db.Insert(3, "key")
	relaytest.Becomes(db, 6, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'`)
	reached = link.sent.Load() >= nth
	r.stop()
	keys := rc.Keys()
	for i, key := range []string{"k-1", "k-2", "k-3"} {
		if at := slices.Index(keys, key); at < 0 || i > 0 && slices.Index(keys, "k-"+string(rune('0'+i))) > at {
			t.Errorf("message %d: sent %v", nth, keys)
		}
	}
	if len(keys) > 12 {
		t.Errorf("message %d: %d requests for 6 events", nth, len(keys))
	}
	return reached
}
