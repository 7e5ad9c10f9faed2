package relay

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// newBlackhole returns the URL of an address from which no answer to a connection comes: a listener
// that accepts nothing, and whose queue is full.
func newBlackhole(tb testing.TB) string {
	tb.Helper()
	v := testkit.NewVacant(tb)
	relaytest.Must(tb, syscall.Listen(int(v.Socket.Fd()), 0))
	for range 10 {
		conn, err := net.DialTimeout("tcp", v.Address, 200*time.Millisecond)
		if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
			return v.URL
		}
		relaytest.Must(tb, err)
		tb.Cleanup(func() { _ = conn.Close() })
	}
	tb.Fatal("the queue of a listener is never full")
	return ""
}

// unreachable returns destinations at which no request can arrive, each for another reason.
func unreachable(tb testing.TB) map[policy.Reason]string {
	secured := httptest.NewUnstartedServer(http.NotFoundHandler())
	secured.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	secured.Config.ErrorLog = log.New(io.Discard, "", 0)
	secured.StartTLS() // with a certificate that no relay trusts
	tb.Cleanup(secured.Close)
	return map[policy.Reason]string{
		policy.ReasonTimeout: newBlackhole(tb),
		policy.ReasonConnect: testkit.NewVacant(tb).URL,
		policy.ReasonDNS:     "http://does-not-exist.invalid/",
		policy.ReasonTLS:     secured.URL,
	}
}

// A destination that cannot be reached spends no attempt of the only event that waits for it, in 63
// hours, whichever of several relays tries, and though they are restarted between two attempts.
func TestOutageOfALoneEvent(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const rounds, length = 14, 4*time.Hour + 30*time.Minute // longer than the longest delay of the schedule
	for reason, url := range unreachable(t) {
		for _, relays := range []int{1, 4} {
			t.Run(fmt.Sprintf("%s, %d relays", reason, relays), func(t *testing.T) {
				t.Parallel()
				db := relaytest.Covered(t)
				d := post.Destination{Name: "default", URL: url}
				if reason == policy.ReasonTimeout {
					d.Timeout = 200 * time.Millisecond
				}
				d.Breaker = policy.BreakerPolicy{ProbeAfter: 5 * time.Millisecond, ProbeMax: 20 * time.Millisecond}
				db.Insert(1, "lone")
				var running []*running
				for range relays {
					running = append(running, start(t, config(db, d)))
				}
				const tried = `SELECT count(*) >= $1 OR EXISTS (SELECT FROM outbox_delivery WHERE status <> 'pending') FROM outbox_attempt`
				relaytest.Becomes(db, true, tried, 1)
				for round := range rounds {
					if round%3 == 0 { // all of them, since the next attempt may be any one's
						for i := range running {
							running[i].stop()
							running[i] = start(t, config(db, d))
						}
					}
					attempts := relaytest.Row[int](db, `SELECT count(*) FROM outbox_attempt`)
					letPass(db, length)
					relaytest.Becomes(db, true, tried, attempts+1)
				}
				// The breaker is written after the attempts that opened it.
				relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_alert WHERE rule = 'breaker_open' AND resolved_at IS NULL`)
				got := relaytest.Row[string](db, `SELECT concat_ws(' ', d.status, d.attempts, breaker, s.reasons) FROM outbox_delivery d, outbox_destination,
					(SELECT string_agg(DISTINCT concat_ws(' ', outcome, reason), ', ') AS reasons FROM outbox_attempt) s`)
				if want := "pending 0"; !strings.HasPrefix(got, want) || !strings.HasSuffix(got, " hold "+string(reason)) {
					t.Errorf("%s, want %s and only attempts that were held for %s", got, want, reason)
				}
			})
		}
	}
}

// A lone event that its destination answers may be at fault itself, and so may one that it leaves
// without an answer: it fails after its eighth attempt, on schedule, also when two relays share the
// attempts, and when the destination could not be reached before.
func TestOutageOrALoneEventAtFault(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]http.HandlerFunc{
		"500": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		"no answer": func(_ http.ResponseWriter, r *http.Request) {
			_, _ = r.Body.Read(make([]byte, 1<<10)) // or the server does not notice that the relay hangs up
			<-r.Context().Done()
		},
	} {
		for _, unreachedFirst := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, unreached before: %t", name, unreachedFirst), func(t *testing.T) {
				if name != "500" || unreachedFirst {
					testsize.Long(t)
				}
				t.Parallel()
				db := relaytest.Covered(t)
				place := testkit.NewVacant(t)
				if !unreachedFirst {
					place.Open(t, answer)
				}
				d := post.Destination{Name: "default", URL: place.URL}
				if name == "no answer" {
					d.Timeout = 300 * time.Millisecond
				}
				d.Breaker = policy.BreakerPolicy{ProbeAfter: 5 * time.Millisecond, ProbeMax: 20 * time.Millisecond}
				db.Insert(1, "lone")
				db.Exec(`CREATE TABLE settled (attempts int, delay interval);
					CREATE FUNCTION note_settle() RETURNS trigger LANGUAGE plpgsql SET search_path = public AS $$ BEGIN
						IF NEW.attempts > OLD.attempts AND NEW.status = 'pending' THEN INSERT INTO settled VALUES (NEW.attempts, NEW.next_attempt_at - now()); END IF;
						RETURN NULL; END $$;
					CREATE TRIGGER note_settle AFTER UPDATE ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION note_settle()`)
				start(t, config(db, d))
				start(t, config(db, d))
				if unreachedFirst {
					relaytest.Becomes(db, true, `SELECT count(*) > 3 FROM outbox_attempt`)
					place.Open(t, answer)
				}
				for attempt := 1; attempt < 8; attempt++ {
					relaytest.Becomes(db, attempt, `SELECT attempts FROM outbox_delivery WHERE claimed_by IS NULL UNION ALL SELECT -1 LIMIT 1`)
					db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now()`)
				}
				relaytest.Becomes(db, "failed 8", `SELECT concat_ws(' ', status, attempts) FROM outbox_delivery`)
				if !relaytest.Row[bool](db, `SELECT array_agg(attempts ORDER BY attempts) = '{1,2,3,4,5,6,7}' AND bool_and(
						delay >= want AND delay <= 1.1 * want)
					FROM settled JOIN unnest('{5s,30s,5m,30m,4h,4h,4h}'::interval[]) WITH ORDINALITY w (want, attempt) ON attempt = attempts`) {
					t.Errorf("delays %v", relaytest.Rows[string](db, `SELECT concat_ws(' ', attempts, delay) FROM settled ORDER BY attempts`))
				}
				relaytest.Becomes(db, true, `SELECT array_agg(attempt ORDER BY id) = '{1,2,3,4,5,6,7,8}' AND array_agg(outcome ORDER BY id) =
					'{retry,retry,retry,retry,retry,retry,retry,fail}' AND count(DISTINCT claim) = 8 FROM outbox_attempt WHERE outcome <> 'hold'`)
				relaytest.Becomes(db, true, `SELECT coalesce(bool_and(breaker = 'closed'), true) FROM outbox_destination`)
				relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_alert WHERE rule = 'breaker_open' AND resolved_at IS NULL`)
			})
		}
	}
}
