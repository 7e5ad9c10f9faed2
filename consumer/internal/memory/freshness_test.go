package memory_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// applyIfNewer asks in the transaction of a handler behind f.
func applyIfNewer(ctx context.Context, f receivertest.Flavour, scope, entity string, v consumer.Version) (bool, error) {
	if f.Name == "pgx" {
		return consumer.ApplyIfNewer(ctx, consumer.Tx(ctx), scope, entity, v)
	}
	return sqlconsumer.ApplyIfNewer(ctx, sqlconsumer.Tx(ctx), scope, entity, v)
}

// fact is one event about an entity: what its state was then.
type fact struct {
	entity string
	number int64 // also the event's id and its sequence
	at     time.Time
}

const factEntities, factWorkers = 100, 8

// facts are events of many entities in an order that is not theirs. Every third of an entity bears
// the time of the one before it, so that the tiebreak decides.
func facts(count int64) (shuffled []fact, newest map[string]int64) {
	newest = map[string]int64{}
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i := range count {
		entity := fmt.Sprintf("entity %d ü", i%factEntities)
		tick := i / factEntities
		if tick%3 == 2 {
			tick--
		}
		at := start.Add(time.Duration(tick) * time.Microsecond)
		shuffled = append(shuffled, fact{entity, i + 1, at})
		newest[entity] = i + 1
	}
	slices.SortFunc(shuffled, func(a, b fact) int { // as good as random, and the same in every run
		x, y := sha256.Sum256([]byte(strconv.FormatInt(a.number, 10))), sha256.Sum256([]byte(strconv.FormatInt(b.number, 10)))
		return bytes.Compare(x[:], y[:])
	})
	return shuffled, newest
}

const stateSchema = `
CREATE TABLE state (entity text PRIMARY KEY, number bigint NOT NULL);
CREATE TABLE outcome (number bigint PRIMARY KEY, applied bool NOT NULL);`

// writeState is what a handler does with a fact: it overwrites the entity's state without looking
// at it.
func writeState(ctx context.Context, exec func(context.Context, string, ...any) error, f fact, applied bool) error {
	if applied {
		if err := exec(ctx, "INSERT INTO state VALUES ($1, $2) ON CONFLICT (entity) DO UPDATE SET number = excluded.number", f.entity, f.number); err != nil {
			return err
		}
	}
	return exec(ctx, "INSERT INTO outcome VALUES ($1, $2)", f.number, applied)
}

// wantNewest asserts that each entity is as its newest event says, and that the test could have
// gone wrong.
func wantNewest(e *receivertest.Env, count int, newest map[string]int64) {
	e.T.Helper()
	rows, err := e.Pool.Query(context.Background(), "SELECT entity, number FROM state")
	pgtest.Must(e.T, err)
	states, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct {
		Entity string
		Number int64
	}])
	pgtest.Must(e.T, err)
	wrong := 0
	for _, state := range states {
		if newest[state.Entity] != state.Number {
			wrong++
		}
	}
	if wrong > 0 || len(states) != len(newest) {
		e.T.Errorf("%d of %d entities are not as their newest event says", wrong, len(states))
	}
	applied, stale := e.Count("SELECT count(*) FROM outcome WHERE applied"), e.Count("SELECT count(*) FROM outcome WHERE NOT applied")
	if applied+stale != count || applied < factEntities || stale < count/2 {
		e.T.Errorf("%d applied and %d stale of %d", applied, stale, count)
	}
	e.T.Logf("%d entities, %d events: %d applied, %d stale", len(states), applied+stale, applied, stale)
}

// eachFact calls work for every fact, several at a time.
func eachFact(all []fact, work func(fact)) {
	var next atomic.Int64
	var workers sync.WaitGroup
	for range factWorkers {
		workers.Go(func() {
			for {
				i := next.Add(1) - 1
				if i >= int64(len(all)) {
					return
				}
				work(all[i])
			}
		})
	}
	workers.Wait()
}

// disturb keeps every twentieth transaction from committing at its first attempt: it fails after
// all is written, or its connection is killed. The sender sends such an event again.
func disturb(ctx context.Context, exec func(context.Context, string, ...any) error, number int64) error {
	switch number % 100 {
	case 3, 24, 45, 66:
		return errors.New("the first attempt fails")
	case 87:
		return exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())")
	}
	return nil
}

// The state of each entity is that of its newest event, through real requests that come in any
// order, fail and come again.
func TestFreshnessOverHTTP(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		count := testsize.Of(map[string]int{"pgx": 10_000, "database/sql": 3_000}, map[string]int{"pgx": 400})[f.Name]
		all, newest := facts(int64(count))
		var disturbed sync.Map
		e := receivertest.NewHandlerEnv(t, f, consumer.Config{Observe: func(context.Context, consumer.Report) {}}, func(e *receivertest.Env) receivertest.HandlerFunc {
			return func(ctx context.Context, event consumer.Event) error {
				var payload struct{ Entity string }
				if err := json.Unmarshal(event.Payload, &payload); err != nil {
					return consumer.Permanent(err)
				}
				v, scope := consumer.BySequence(event.Sequence), "by sequence"
				if event.ID%2 == 0 { // which is the same for all events of an entity
					v, scope = consumer.ByTime(event.CreatedAt, event.ID), "by time"
				}
				applied, err := applyIfNewer(ctx, f, scope, payload.Entity, v)
				if err != nil {
					return err
				}
				if err := writeState(ctx, e.Exec, fact{entity: payload.Entity, number: event.ID}, applied); err != nil {
					return err
				}
				if _, again := disturbed.LoadOrStore(event.ID, true); again {
					return nil
				}
				return disturb(ctx, e.Exec, event.ID)
			}
		})
		e.MustExec(stateSchema)
		e.Client.Transport.(*http.Transport).MaxIdleConnsPerHost = factWorkers
		var failures atomic.Int64
		eachFact(all, func(f fact) {
			for {
				r := e.NewRequest(fmt.Sprintf("event-%d", f.number), `{"entity":"`+f.entity+`"}`,
					receivertest.With(webhook.EventType, "entity.changed"), receivertest.With(webhook.EventID, strconv.FormatInt(f.number, 10)),
					receivertest.With(webhook.Sequence, strconv.FormatInt(f.number, 10)), receivertest.With(webhook.CreatedAt, f.at.Format(time.RFC3339Nano)))
				got, err := e.Try(r)
				if err != nil {
					t.Error(err)
					return
				}
				if got.Status == 204 {
					return
				}
				failures.Add(1)
			}
		})
		if int(failures.Load()) < count/20 {
			t.Errorf("only %d attempts failed", failures.Load())
		}
		wantNewest(e, count, newest)
	})
}

// inTx runs what in its own transaction, through both drivers' functions.
func inTx(t *testing.T, e *receivertest.Env, driver string, what func(ask func(scope, entity string, v consumer.Version) (bool, error))) {
	t.Helper()
	if driver == "pgx" {
		tx, err := e.Pool.Begin(t.Context())
		pgtest.Must(t, err)
		defer tx.Rollback(context.Background())
		what(func(scope, entity string, v consumer.Version) (bool, error) {
			return consumer.ApplyIfNewer(t.Context(), tx, scope, entity, v)
		})
		_ = tx.Commit(t.Context())
		return
	}
	tx, err := receivertest.OpenSQL(t, e.DSN).BeginTx(t.Context(), nil)
	pgtest.Must(t, err)
	defer tx.Rollback()
	what(func(scope, entity string, v consumer.Version) (bool, error) {
		return sqlconsumer.ApplyIfNewer(t.Context(), tx, scope, entity, v)
	})
	_ = tx.Commit()
}

func TestVersions(t *testing.T) {
	noon := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	elsewhere := time.FixedZone("", 7200)
	year := func(y int) time.Time { return time.Date(y, 1, 2, 0, 0, 0, 0, time.UTC) }
	type step struct {
		scope, entity string
		version       consumer.Version
		want          string // applied, stale, or a part of an error
	}
	cases := map[string][]step{
		"by sequence": {
			{"s", "e", consumer.BySequence(2), "applied"},
			{"s", "e", consumer.BySequence(2), "stale"},
			{"s", "e", consumer.BySequence(1), "stale"},
			{"s", "e", consumer.BySequence(3), "applied"},
			{"s", "E", consumer.BySequence(1), "applied"},
			{"S", "e", consumer.BySequence(1), "applied"},
			{"s", "e", consumer.BySequence(1<<63 - 1), "applied"},
			{"s", "e", consumer.BySequence(1<<63 - 1), "stale"},
		},
		"by time": {
			{"s", "e", consumer.ByTime(noon, 5), "applied"},
			{"s", "e", consumer.ByTime(noon, 5), "stale"},
			{"s", "e", consumer.ByTime(noon.In(elsewhere), 5), "stale"},
			{"s", "e", consumer.ByTime(noon, 4), "stale"},
			{"s", "e", consumer.ByTime(noon.Add(-time.Microsecond), 6), "stale"},
			{"s", "e", consumer.ByTime(noon, 6), "applied"},
			{"s", "e", consumer.ByTime(noon.Add(999*time.Nanosecond), 6), "stale"}, // the same microsecond
			{"s", "e", consumer.ByTime(noon.Add(999*time.Nanosecond), 7), "applied"},
			{"s", "e", consumer.ByTime(noon.Add(time.Microsecond), -1), "applied"},
			{"s", "e", consumer.ByTime(noon.Add(1999*time.Nanosecond), -1), "stale"},
			{"s", "e", consumer.ByTime(year(9999), 0), "applied"},
			{"s", "old", consumer.ByTime(year(1), 0), "applied"},
			{"s", "old", consumer.ByTime(year(1).Add(time.Microsecond), -1<<63), "applied"},
			{"s", "old", consumer.ByTime(year(1).Add(time.Microsecond), -1<<63), "stale"},
		},
		"texts": {
			{"s", "größe 漢字", consumer.BySequence(1), "applied"},
			{"s", "größe 漢字", consumer.BySequence(1), "stale"},
			{"s", "gro\u0308ße 漢字", consumer.BySequence(1), "applied"}, // other bytes, another entity
			{"s", strings.Repeat("ü", 127) + "x", consumer.BySequence(1), "applied"},
			{"s", strings.Repeat("ü", 128), consumer.BySequence(1), "the entity must be 1 to 255 bytes"},
			{"s", "", consumer.BySequence(1), "the entity must be"},
			{"", "e", consumer.BySequence(1), "the scope must be"},
			{"s", "a\x00b", consumer.BySequence(1), "the entity must be"},
			{"s", "a\nb", consumer.BySequence(1), "the entity must be"},
			{"s", "caf\xe9", consumer.BySequence(1), "the entity must be"},
			{"s", "a' OR 'x", consumer.BySequence(1), "applied"},
		},
		"no version": {
			{"s", "e", consumer.Version{}, "the version is zero: make one"},
			{"s", "e", consumer.BySequence(0), "does the producer set an ordering key?"},
			{"s", "e", consumer.BySequence(-1), "a sequence is at least 1"},
			{"s", "e", consumer.ByTime(time.Time{}, 1), "the time is zero"},
			{"s", "e", consumer.ByTime(year(10000), 1), "years 1 to 9999"},
			{"s", "e", consumer.ByTime(year(0), 1), "years 1 to 9999"},
			{"s", "e", consumer.BySequence(1), "applied"}, // nothing was recorded, and the transaction lives
		},
		"time after sequence": {
			{"s", "e", consumer.BySequence(1), "applied"},
			{"s", "other", consumer.ByTime(noon, 1), "applied"},
			{"s", "e", consumer.ByTime(noon, 1), `earlier versions of this entity in scope "s" are of the other kind, and 2026-01-01T12:00:00Z, 1 cannot`},
		},
		"sequence after time": {
			{"s", "e", consumer.ByTime(noon, 1), "applied"},
			{"s", "e", consumer.BySequence(1), "sequence 1 cannot be compared"},
		},
	}
	t.Parallel()
	for _, driver := range []string{"pgx", "database/sql"} {
		for name, steps := range cases {
			t.Run(driver+" "+name, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				dsn := pgtest.New(t, migrations.Inbox)
				e := &receivertest.Env{T: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)}
				inTx(t, e, driver, func(ask func(string, string, consumer.Version) (bool, error)) {
					for i, s := range steps {
						got, err := ask(s.scope, s.entity, s.version)
						switch {
						case err != nil && (got || !strings.Contains(err.Error(), s.want)):
							t.Errorf("step %d: %v, %v; want %s", i, got, err, s.want)
						case err == nil && (s.want != "applied" && s.want != "stale" || got != (s.want == "applied")):
							t.Errorf("step %d: %v, want %s", i, got, s.want)
						}
					}
				})
			})
		}
	}
}

// Two transactions with one entity: the second waits, and is judged by what the first one left.
func TestFreshnessWaitsForTheOther(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		first, second int64
		known         bool // the entity has a version already
		commit        bool
		want          bool // the second is applied
	}{
		"newer commits":               {5, 4, false, true, false},
		"newer rolls back":            {5, 4, false, false, true},
		"older commits":               {4, 5, false, true, true},
		"known, newer commits":        {5, 4, true, true, false},
		"known, newer rolls back":     {5, 4, true, false, true},
		"known, equal commits":        {5, 5, true, true, false},
		"known, older commits":        {4, 5, true, true, true},
		"known, equal is rolled back": {5, 5, true, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 2)
			t.Parallel()
			dsn := pgtest.New(t, migrations.Inbox)
			e := &receivertest.Env{T: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)}
			if c.known {
				e.MustExec("INSERT INTO inbox_freshness (scope, entity, sequence) VALUES ('s', 'e', 1)")
			}
			first, err := e.Pool.Begin(t.Context())
			pgtest.Must(t, err)
			defer first.Rollback(context.Background())
			if got, err := consumer.ApplyIfNewer(t.Context(), first, "s", "e", consumer.BySequence(c.first)); err != nil || !got {
				t.Fatalf("the first: %v, %v", got, err)
			}
			var got bool
			var all sync.WaitGroup
			all.Go(func() {
				err := pgx.BeginFunc(t.Context(), e.Pool, func(tx pgx.Tx) (err error) {
					got, err = consumer.ApplyIfNewer(t.Context(), tx, "s", "e", consumer.BySequence(c.second))
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
			e.Await(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`)
			if c.commit {
				err = first.Commit(t.Context())
			} else {
				err = first.Rollback(t.Context())
			}
			pgtest.Must(t, err)
			all.Wait()
			testkit.Equal(t, "the second", got, c.want)
			want := max(c.first, c.second)
			if !c.commit {
				want = c.second
			}
			if n := e.Count("SELECT sequence FROM inbox_freshness"); int64(n) != want {
				t.Errorf("the newest is %d, want %d", n, want)
			}
		})
	}
}

// Under a higher isolation PostgreSQL refuses what it cannot serialise, and the event comes again.
func TestFreshnessUnderRepeatableRead(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Inbox)
	e := &receivertest.Env{T: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)}
	e.MustExec("INSERT INTO inbox_freshness (scope, entity, sequence) VALUES ('s', 'e', 1)")
	for _, version := range []int64{3, 9} { // older and newer than what another transaction leaves
		err := pgx.BeginTxFunc(t.Context(), e.Pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "SELECT FROM inbox_freshness"); err != nil { // takes the snapshot
				return err
			}
			e.MustExec("UPDATE inbox_freshness SET sequence = 5")
			_, err := consumer.ApplyIfNewer(t.Context(), tx, "s", "e", consumer.BySequence(version))
			return err
		})
		if err == nil || !strings.Contains(err.Error(), "SQLSTATE 40001") {
			t.Errorf("version %d: %v", version, err)
		}
	}
}

// Plain SQL cannot leave an entity with both kinds of version, or with half of one.
func TestFreshnessRowsAreOfOneKind(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Inbox)
	pool := pgtest.Pool(t, dsn)
	for _, columns := range []string{"NULL, NULL, NULL", "1, now(), 1", "1, NULL, 1", "NULL, now(), NULL", "NULL, NULL, 1", "1, now(), NULL"} {
		if _, err := pool.Exec(t.Context(), "INSERT INTO inbox_freshness (scope, entity, sequence, at, tiebreak) VALUES ('s', 'e', "+columns+")"); err == nil {
			t.Errorf("%s was taken", columns)
		}
	}
}
