package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A receiver that always answers 500: eight attempts, and between them at least what the schedule says and at most a
// tenth more, by the database's clock. The waiting itself is cut short by making the row due.
func TestScheduleOfAReceiverThatNeverRecovers(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, status(http.StatusInternalServerError))
	db.insert(1, "key")
	// What settles, and when, by the database's own clock.
	db.exec(`CREATE TABLE settled (attempts int, next_attempt_at timestamptz, at timestamptz);
		CREATE FUNCTION note_settle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.attempts > OLD.attempts THEN INSERT INTO settled VALUES (NEW.attempts, NEW.next_attempt_at, now()); END IF;
			RETURN NULL; END $$;
		CREATE TRIGGER note_settle AFTER UPDATE ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION note_settle()`)
	r := start(t, db.config(post.Destination{Name: "default", URL: rc.URL}))
	for attempt := 1; attempt < 8; attempt++ {
		r.settles(t, policy.Retry, attempt)
		db.exec(`UPDATE outbox_delivery SET next_attempt_at = now()`)
	}
	r.settles(t, policy.Fail, 1)
	if rc.total() != 8 {
		t.Errorf("%d requests", rc.total())
	}
	want := []time.Duration{
		5 * time.Second, 30 * time.Second, 5 * time.Minute, 30 * time.Minute, 4 * time.Hour, 4 * time.Hour, 4 * time.Hour,
	}
	got := rows[float64](db, `SELECT extract(epoch FROM next_attempt_at - at)::float8 FROM settled WHERE attempts < 8 ORDER BY attempts`)
	if len(got) != len(want) {
		t.Fatalf("gaps %v, want %v", got, want)
	}
	for i, d := range want {
		if got[i] < d.Seconds() || got[i] > 1.1*d.Seconds() {
			t.Errorf("after attempt %d: %g s, want %s and at most a tenth more", i+1, got[i], d)
		}
	}
	if !row[bool](db, `SELECT status = 'failed' AND attempts = 8 AND last_status = 500 AND last_reason = 'server_error'
		AND last_error LIKE 'attempt 8 of 8: 500%' AND claimed_by IS NULL FROM outbox_delivery`) {
		t.Error("the delivery is not failed as it should be")
	}
	if !row[bool](db, `SELECT array_agg(attempt ORDER BY id) = '{1,2,3,4,5,6,7,8}' AND array_agg(outcome ORDER BY id) =
		'{retry,retry,retry,retry,retry,retry,retry,fail}' AND bool_and(status = 500) AND count(DISTINCT claim) = 8 FROM outbox_attempt`) {
		t.Errorf("the attempt log does not hold the eight attempts")
	}
}

// Retry-After lengthens the wait and never shortens it, up to the destination's cap, and the lane slows down.
func TestRetryAfterOfAReceiver(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status   int
		value    string
		min, max float64 // seconds
	}{
		"longer than the schedule":  {503, "600", 600, 600},
		"a little longer":           {429, "7", 7, 7},
		"shorter than the schedule": {429, "1", 5, 5.5},
		"garbage":                   {429, "soon", 5, 5.5},
		"beyond the cap":            {429, "1000000000", 3600, 3600},
		"negative":                  {503, "-600", 5, 5.5},
		"of another status":         {500, "600", 5, 5.5},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, func(w http.ResponseWriter, _ request) {
				w.Header().Set("Retry-After", c.value)
				w.WriteHeader(c.status)
			})
			db.insert(1, "key")
			db.exec(`CREATE TABLE settled (delay float8);
				CREATE FUNCTION note_settle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					INSERT INTO settled VALUES (extract(epoch FROM NEW.next_attempt_at - now())); RETURN NULL; END $$;
				CREATE TRIGGER note_settle AFTER UPDATE OF next_attempt_at ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION note_settle()`)
			d := post.Destination{Name: "default", URL: rc.URL, Retry: policy.RetryPolicy{RetryAfterMax: time.Hour}}
			r := start(t, db.config(d))
			r.settles(t, policy.Retry, 1)
			if got := row[float64](db, `SELECT delay FROM settled`); got < c.min || got > c.max {
				t.Errorf("%g s, want %g to %g", got, c.min, c.max)
			}
			l := r.lane("default")
			l.mu.Lock()
			defer l.mu.Unlock()
			if slower := l.flow.Paced() > 0 || l.flow.Concurrency() < post.DefaultLaneInFlight; slower != (c.status != 500) {
				t.Errorf("the lane goes slower: %t", slower)
			}
		})
	}
}
