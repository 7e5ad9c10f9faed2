package reconcile_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

func newReceiver(t *testing.T, effects string) (*reconcile.Receiver, *pgxpool.Pool) {
	t.Helper()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	read := func(ctx context.Context, f func(pgx.Tx) error) error {
		return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, f)
	}
	return &reconcile.Receiver{Receiver: "shop", Source: "billing", Effects: effects, Read: read, ReadEffects: read}, pool
}

const fill = `
INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, payload)
SELECT $1, $2, 'k' || i, 'succeeded', now() - interval '1 hour', 'private' FROM generate_series(1, $3::int) i`

func ask(t *testing.T, r *reconcile.Receiver, q reconcile.Request) reconcile.Answer {
	t.Helper()
	a, err := r.Answer(t.Context(), q)
	pgtest.Must(t, err)
	return a
}

// heldKeys returns the keys of rows.
func heldKeys(held []reconcile.Held) (keys []string) {
	for _, h := range held {
		keys = append(keys, h.Key)
	}
	return keys
}

// A digest has each key of this receiver and source once, in its range, and no other's: whatever
// the order of the rows, and however many requests it takes.
func TestDigestHasEachKeyOnce(t *testing.T) {
	t.Parallel()
	r, pool := newReceiver(t, "")
	pgtest.Exec(t, pool, fill, "shop", "billing", 3000)
	pgtest.Exec(t, pool, fill, "shop", "another", 50)
	pgtest.Exec(t, pool, fill, "other", "billing", 50)
	pgtest.Exec(t, pool, `INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('shop', 'billing', 'late', 'failed')`)
	salt, bounds := reconcile.NewSalt(), []string{"k1500", "k2", "k2999"}
	until := pgtest.Row[time.Time](t, pool, "SELECT now() - interval '1 minute'")
	want := reconcile.NewDigest(salt, bounds)
	for i := range 3000 {
		want.Add(fmt.Appendf(nil, "k%d", i+1))
	}
	got := reconcile.NewDigest(salt, bounds)
	q := reconcile.Request{Ask: reconcile.AskDigest, Salt: salt, Bounds: bounds, Until: until}
	a := ask(t, r, q)
	if !got.Merge(a.Ranges) || !reflect.DeepEqual(got.Counts, want.Counts) || !reflect.DeepEqual(got.Sums, want.Sums) || len(a.Held) != 0 || a.Next < a.Pages {
		t.Errorf("got %v and %+v, want %v", got.Counts, a, want.Counts)
	}
	if q.Until = (time.Time{}); len(ask(t, r, q).Held) != 1 {
		t.Error("the row whose effect is in doubt is not named")
	}
	if q.Page = 1 << 40; len(ask(t, r, q).Ranges) != 0 {
		t.Error("there is something behind the last page")
	}
	if q.Page, q.Since = 0, time.Now().Add(time.Hour); len(ask(t, r, q).Ranges) != 0 {
		t.Error("there is something from the future")
	}
}

// The hash is what doc and wire say, so that receivers in other languages can compute it.
func TestHashIsThatOfTheContract(t *testing.T) {
	t.Parallel()
	salt := []byte("0123456789abcdef")
	sum := sha256.Sum256([]byte("0123456789abcdefinvoice-17"))
	d := reconcile.NewDigest(salt, nil)
	if got, want := d.Hash([]byte("invoice-17")), binary.BigEndian.Uint64(sum[:8]); got != want {
		t.Errorf("got %d, want %d", got, want)
	}
	if a, b := reconcile.NewSalt(), reconcile.NewSalt(); len(a) != 16 || slices.Equal(a, b) {
		t.Errorf("salts %x and %x", a, b)
	}
}

func TestRangeOfAKey(t *testing.T) {
	t.Parallel()
	bounds := []string{"b", "d", "f"}
	d := reconcile.NewDigest(reconcile.NewSalt(), bounds)
	for key, want := range map[string]int{"": 0, "a": 0, "b": 0, "ba": 1, "d": 1, "e": 2, "f": 2, "g": 3, "\xff": 3} {
		if got := d.Range([]byte(key)); got != want {
			t.Errorf("%q is in range %d, want %d", key, got, want)
		}
	}
	for range 1000 {
		key := string(rune('a' + rand.IntN(8)))
		i, _ := slices.BinarySearch(bounds, key)
		if got := d.Range([]byte(key)); got != i {
			t.Errorf("%q is in range %d, want %d", key, got, i)
		}
	}
	if d.Merge([]reconcile.Range{{Number: 4}}) || d.Merge([]reconcile.Range{{Number: -1}}) {
		t.Error("a range that is not there was added")
	}
}

func TestListsAndStates(t *testing.T) {
	t.Parallel()
	r, pool := newReceiver(t, "SELECT key FROM effect")
	pgtest.Exec(t, pool, fill, "shop", "billing", 9)
	pgtest.Exec(t, pool, fill, "shop", "another", 20)
	pgtest.Exec(t, pool, `CREATE TABLE effect (key text, note text)`)
	pgtest.Exec(t, pool, `INSERT INTO effect SELECT 'k' || i, '' FROM generate_series(1, 9) i, generate_series(1, CASE i WHEN 4 THEN 3 ELSE 1 END)`)
	pgtest.Exec(t, pool, `INSERT INTO effect VALUES (NULL, ''), (NULL, '')`)
	pgtest.Exec(t, pool, `INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('shop', 'billing', '2026-01-02 UTC', now())`)
	pgtest.Exec(t, pool, `UPDATE processed_events SET processing_state = 'recorded' WHERE idempotency_key IN ('k1', 'k2', 'k3') AND source = 'billing'`)
	pgtest.Exec(t, pool, `INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, inbox_id, received_at)
		SELECT 'shop', s, k, state, row_number() OVER (), now() - interval '1 hour' FROM (VALUES ('k1', 'pending'), ('k2', 'succeeded')) v (k, state), unnest(ARRAY['billing', 'another']) s`)

	if a := ask(t, r, reconcile.Request{Ask: reconcile.AskDescribe}); a.Receiver != "shop" || a.Source != "billing" || !a.CountsEffects || a.Now.IsZero() ||
		!a.RemembersSince.Equal(time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)) {
		t.Errorf("described %+v", a)
	}
	testkit.Equal(t, "listed", heldKeys(ask(t, r, reconcile.Request{Ask: reconcile.AskList, After: "k3", Limit: 4}).Held), []string{"k4", "k5", "k6", "k7"})
	a := ask(t, r, reconcile.Request{Ask: reconcile.AskFind, Keys: []string{"k1", "k2", "k3", "k9", "none", "k15"}})
	var states []string
	for _, h := range a.Held {
		states = append(states, h.Key+" "+h.State)
	}
	if want := []string{"k1 pending", "k2 succeeded", "k3 succeeded", "k9 succeeded"}; !slices.Equal(states, want) {
		t.Errorf("found %q, want %q", states, want)
	}
	if got := ask(t, r, reconcile.Request{Ask: reconcile.AskUnfinished, Limit: 10}).Held; len(got) != 1 || got[0].Key != "k1" || got[0].Finished() {
		t.Errorf("unfinished %+v", got)
	}
	if got := ask(t, r, reconcile.Request{Ask: reconcile.AskUnfinished, Limit: 10, Until: time.Now().Add(-2 * time.Hour)}).Held; len(got) != 0 {
		t.Errorf("unfinished two hours ago %+v", got)
	}
	doubled := reconcile.Request{Ask: reconcile.AskDoubled, Limit: 10}
	if got := ask(t, r, doubled).Held; len(got) != 1 || got[0].Key != "k4" || got[0].Effects != 3 {
		t.Errorf("doubled %+v", got)
	}
	if doubled.Keys = []string{"k3", "k5"}; len(ask(t, r, doubled).Held) != 0 {
		t.Error("other keys are doubled than those that were asked for")
	}
	if doubled.Keys = []string{"k3", "k4"}; !slices.Equal(heldKeys(ask(t, r, doubled).Held), []string{"k4"}) {
		t.Error("a key is not doubled that was asked for")
	}
	if doubled.Until = time.Now().Add(-2 * time.Hour); len(ask(t, r, doubled).Held) != 0 {
		t.Error("something was doubled two hours ago")
	}
	doubled.Until, doubled.Since = time.Time{}, time.Now()
	if len(ask(t, r, doubled).Held) != 0 {
		t.Error("something of before is doubled since now")
	}
	pgtest.Exec(t, pool, `DELETE FROM effect WHERE key IN ('k1', 'k2', 'k3', 'k5')`) // k1 waits in the inbox, k2 has succeeded there, k3 is there no more
	missing := reconcile.Request{Ask: reconcile.AskMissing, Limit: 10}
	testkit.Equal(t, "missing", heldKeys(ask(t, r, missing).Held), []string{"k2", "k5"})
	if missing.Keys = []string{"k4", "k5"}; !slices.Equal(heldKeys(ask(t, r, missing).Held), []string{"k5"}) {
		t.Error("other keys are missing than those that were asked for")
	}
	if missing.Until = time.Now().Add(-2 * time.Hour); len(ask(t, r, missing).Held) != 0 {
		t.Error("something was missing two hours ago")
	}
	r.Effects = ""
	if got := ask(t, r, reconcile.Request{Ask: reconcile.AskDoubled, Limit: 10}).Held; len(got) != 0 {
		t.Errorf("doubled without a query: %+v", got)
	}
}

// An answer about one source has no key of another source or receiver, whose effects are in the
// same table.
func TestSecurityDoubledAreOfOneSource(t *testing.T) {
	t.Parallel()
	r, pool := newReceiver(t, "SELECT key FROM effect")
	pgtest.Exec(t, pool, fill, "shop", "billing", 2)
	pgtest.Exec(t, pool, `UPDATE processed_events SET idempotency_key = 'own-' || idempotency_key`)
	pgtest.Exec(t, pool, fill, "shop", "another", 20)
	pgtest.Exec(t, pool, fill, "other", "billing", 30)
	pgtest.Exec(t, pool, `CREATE TABLE effect (key text)`)
	pgtest.Exec(t, pool, `INSERT INTO effect SELECT idempotency_key FROM processed_events, generate_series(1, 2)`)
	pgtest.Exec(t, pool, `INSERT INTO effect VALUES ('unknown'), ('unknown')`)
	testkit.Equal(t, "doubled", heldKeys(ask(t, r, reconcile.Request{Ask: reconcile.AskDoubled, Limit: 2}).Held), []string{"own-k1", "own-k2"})
}

// A query that would write fails, and so does one that hides a second statement.
func TestSecurityEffectsOnlyRead(t *testing.T) {
	t.Parallel()
	for _, effects := range []string{
		"DELETE FROM processed_events RETURNING idempotency_key",
		"SELECT idempotency_key FROM processed_events) AS e (key) GROUP BY 1) t; DELETE FROM processed_events; --",
		"WITH gone AS (DELETE FROM processed_events RETURNING idempotency_key) SELECT idempotency_key FROM gone",
		"SELECT nextval('inbox_id_seq')::text",
	} {
		r, pool := newReceiver(t, effects)
		pgtest.Exec(t, pool, fill, "shop", "billing", 3)
		if _, err := r.Answer(t.Context(), reconcile.Request{Ask: reconcile.AskDoubled, Limit: 10}); err == nil {
			t.Errorf("%s: no error", effects)
		}
		if _, err := r.Answer(t.Context(), reconcile.Request{Ask: reconcile.AskMissing, Limit: 10}); err == nil {
			t.Errorf("%s: no error, of what is missing", effects)
		}
		if n := pgtest.Row[int](t, pool, "SELECT count(*) FROM processed_events"); n != 3 {
			t.Errorf("%s: %d rows are left", effects, n)
		}
	}
}

// The largest question fits into the body that receivers take.
func TestLargestQuestionFits(t *testing.T) {
	t.Parallel()
	q := reconcile.Request{Ask: reconcile.AskDigest, Salt: reconcile.NewSalt(), Since: time.Now(), Until: time.Now(), Page: 1 << 40}
	for i := range reconcile.MaxBounds {
		q.Bounds = append(q.Bounds, fmt.Sprintf("%04d", i)+strings.Repeat(`"`, reconcile.MaxBoundBytes/reconcile.MaxBounds-4))
	}
	r, _ := newReceiver(t, "")
	ask(t, r, q)
	if body, err := q.Encode(); err != nil || len(body) > 1<<20 {
		t.Errorf("%d bytes, %v", len(body), err)
	}
	q.Bounds = slices.Repeat([]string{"<&>"}, 1)
	if body, _ := q.Encode(); !strings.Contains(string(body), `"<&>"`) {
		t.Errorf("%s", body)
	}
}

// Whatever is asked, the answer is bounded, or refused before the database is asked.
func TestSecurityQuestionsAreBounded(t *testing.T) {
	t.Parallel()
	r := &reconcile.Receiver{Receiver: "shop", Source: "billing", Read: func(context.Context, func(pgx.Tx) error) error {
		t.Error("the database was asked")
		return nil
	}}
	many := func(n int, key string) (keys []string) {
		for i := range n {
			keys = append(keys, fmt.Sprintf("%s%06d", key, i))
		}
		return keys
	}
	salt := reconcile.NewSalt()
	for name, q := range map[string]reconcile.Request{
		"nothing":               {},
		"something else":        {Ask: "payloads"},
		"no salt":               {Ask: reconcile.AskDigest},
		"a short salt":          {Ask: reconcile.AskDigest, Salt: salt[1:]},
		"a long salt":           {Ask: reconcile.AskDigest, Salt: append(slices.Clone(salt), 1)},
		"too many ranges":       {Ask: reconcile.AskDigest, Salt: salt, Bounds: many(reconcile.MaxBounds+1, "")},
		"too long bounds":       {Ask: reconcile.AskDigest, Salt: salt, Bounds: many(reconcile.MaxBounds, strings.Repeat("x", 100))},
		"bounds out of order":   {Ask: reconcile.AskDigest, Salt: salt, Bounds: []string{"b", "a"}},
		"a bound twice":         {Ask: reconcile.AskDigest, Salt: salt, Bounds: []string{"a", "a"}},
		"a negative page":       {Ask: reconcile.AskDigest, Salt: salt, Page: -1},
		"too many keys":         {Ask: reconcile.AskFind, Keys: many(reconcile.MaxKeys+1, "")},
		"a huge key":            {Ask: reconcile.AskFind, Keys: []string{strings.Repeat("x", 1<<20)}},
		"a huge position":       {Ask: reconcile.AskList, Limit: 1, After: strings.Repeat("x", 1<<20)},
		"a list without limit":  {Ask: reconcile.AskList},
		"a huge list":           {Ask: reconcile.AskList, Limit: 1 << 30},
		"huge unfinished":       {Ask: reconcile.AskUnfinished, Limit: reconcile.MaxKeys + 1},
		"negative doubled":      {Ask: reconcile.AskDoubled, Limit: -1},
		"missing of any number": {Ask: reconcile.AskMissing},
	} {
		if a, err := r.Answer(t.Context(), q); !errors.Is(err, reconcile.ErrRequest) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
}
