package chaos

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Whichever message of a receiver to its database is lost with the connection, or whose answer: the
// sender comes again, to another receiver, and the effect is made once. A success that the sender
// has heard of is a duplicate then. The relay's half of this is
// TestRelayMeetsItsFateAtEveryMessage.
func TestAnyMessageOfAReceiverMayFail(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		for what, at := range map[string]stageOfMessage{"the message": unsent, "its answer": sent} {
			t.Run(what, func(t *testing.T) {
				healthy := receivertest.NewEnv(t, f, consumer.Config{Observe: receivertest.Unheard}, receivertest.Effect)
				failed, refused := int64(0), 0
				for ; ; failed++ {
					l, dsn := linkTo(t, healthy.DSN)
					doomed := receivertest.NewEnvAt(t, f, dsn, consumer.Config{Observe: receivertest.Unheard}, receivertest.Effect)
					key := fmt.Sprintf("k%d", failed)
					l.dooms(&doom{n: failed + 1, at: at, meet: ends})
					first, err := healthy.Try(healthy.NewRequestTo(doomed.URL, key, "{}"))
					accepted := err == nil && first.Status == http.StatusCreated
					if !accepted {
						refused++
					}
					again := healthy.Post(key, "{}")
					for tick := time.NewTicker(5 * time.Millisecond); again.Status == http.StatusConflict; <-tick.C {
						again = healthy.Post(key, "{}") // until the server has noticed that the connection is gone
					}
					if again.Status != http.StatusCreated || accepted && again.Header.Get(webhook.Replayed) == "" {
						t.Errorf("message %d: answered %d, then %d %v", failed+1, first.Status, again.Status, again.Header)
					}
					healthy.WantRows(key, 1, 1)
					if l.sent.Load() <= failed {
						break
					}
				}
				t.Logf("%d messages failed, one after the other; %d requests were refused", failed, refused)
				if failed < 4 || refused == 0 { // connect, admit, the effect, COMMIT
					t.Error("that is not all of a transaction")
				}
			})
		}
	})
}

// linkTo returns a link to the database of a URL, and its URL behind the link.
func linkTo(t *testing.T, dsn string) (l *link, behind string) {
	t.Helper()
	server, err := url.Parse(dsn)
	pgtest.Must(t, err)
	socket := filepath.Join(server.Query().Get("host"), ".s.PGSQL."+server.Query().Get("port"))
	l = newLink(t, func() (net.Conn, error) { return net.Dial("unix", socket) })
	return l, fmt.Sprintf("postgres://postgres@%s%s?sslmode=disable", l.addr(), server.Path)
}
