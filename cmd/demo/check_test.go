package main

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// story is facts that keep every promise, with one of each fault in them:
//
//	A  delivered at once
//	B  refused with 500, then delivered
//	C  its answer lost, then a duplicate
//	D  its relay killed after the POST, then a duplicate
//	E  its receiver killed after the commit, then a duplicate
//	F  rolled back
//
// A and D have one ordering key. clock returns a time of the story by its seconds.
const story = `
CREATE FUNCTION clock(second float8) RETURNS timestamptz LANGUAGE sql AS $$ SELECT timestamptz '2026-11-01 12:00:00Z' + second * interval '1 s' $$;
INSERT INTO facts.event (id, key, ordering_key, deliveries, status, attempts, delivery) VALUES
    (1, 'A', 'customer', 1, 'delivered', 1, '1-default-1'),
    (2, 'B', NULL, 1, 'delivered', 2, '2-default-2'),
    (3, 'C', NULL, 1, 'delivered', 2, '3-default-2'),
    (4, 'D', 'customer', 1, 'delivered', 1, '4-default-2'),
    (5, 'E', NULL, 1, 'delivered', 2, '5-default-2');
INSERT INTO facts.invoice (key, at) SELECT key, clock(1) FROM facts.event;
INSERT INTO facts.shipment (expected, key, at) SELECT key, key, clock(CASE key WHEN 'D' THEN 26 ELSE 2 END) FROM facts.event;
INSERT INTO facts.processed (key) SELECT key FROM facts.event;
INSERT INTO facts.failure (event_id, delivery, reason, ended, held) VALUES
    (2, '2-default-1', 'server_error', clock(20), false),
    (3, '3-default-1', 'network', clock(20), false),
    (5, '5-default-1', 'network', clock(20), false);
INSERT INTO facts.lost_claim (delivery, life) VALUES ('4-default-1', 'relay-1.1');
INSERT INTO demo_note (what, name) VALUES ('killed', 'relay-1.1'), ('died', 'logistics.1'), ('rolled back', 'F');
INSERT INTO facts.request (key, delivery, fault, status, replayed, at, answered_at) VALUES
    ('A', '1-default-1', '', 201, false, clock(0), clock(20)),
    ('B', '2-default-1', 'refuse', 500, false, clock(0), clock(20)),
    ('B', '2-default-2', '', 201, false, clock(0), clock(20)),
    ('C', '3-default-1', 'lose', 201, false, clock(0), clock(20)),
    ('C', '3-default-2', '', 201, true, clock(0), clock(20)),
    ('D', '4-default-1', '', 201, false, clock(26), clock(27)),
    ('D', '4-default-2', '', 201, true, clock(27), clock(28)),
    ('E', '5-default-1', '', 0, false, clock(0), '0001-01-01 00:00Z'),
    ('E', '5-default-2', '', 201, true, clock(0), clock(20));`

// facts returns a database with the facts of the story.
func facts(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
	for _, script := range []string{financeTables, createFacts, story} {
		pgtest.Exec(t, db, script)
	}
	return db
}

// broken returns how the facts break the promises after a lie, which is undone then.
func broken(t *testing.T, db *pgxpool.Pool, lie string) (breaches []string) {
	t.Helper()
	tx, err := db.Begin(t.Context())
	pgtest.Must(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, lie)
	_, rules, err := check(t.Context(), tx)
	pgtest.Must(t, err)
	for _, r := range rules {
		breaches = append(breaches, r.broken...)
	}
	return breaches
}

func TestCheckKeepsQuiet(t *testing.T) {
	t.Parallel()
	db := facts(t)
	if found := broken(t, db, ""); len(found) > 0 {
		t.Errorf("found %q in a story without a lie", found)
	}
	want := figures{
		Committed: 5, RolledBack: 1, Posts: 9, Retries: 4, Suppressed: 3, Refused: 1, AnswersLost: 1, Effects: 5,
		RelaysKilled: 1, ReceiversKilled: 1, P50: time.Second, P99: 25 * time.Second,
	}
	if got, _, err := check(t.Context(), db); got != want || err != nil {
		t.Errorf("figures are %+v, %v, want %+v", got, err, want)
	}
	pgtest.Exec(t, db, `TRUNCATE facts.invoice, facts.shipment`)
	if got, _, err := check(t.Context(), db); got.Committed != 0 || got.P50 != 0 || err != nil {
		t.Errorf("without invoices figures are %+v, %v", got, err)
	}
}

// What a killed relay had written about an attempt may reach the database when the claim is
// another's by then: the log has it, the count may not.
func TestCheckAllowsTheLastSettleOfTheDead(t *testing.T) {
	t.Parallel()
	db := facts(t)
	for attempts, want := range map[string]int{"0": 1, "1": 0, "2": 0, "3": 1} {
		found := broken(t, db, `UPDATE facts.request SET status = 500, fault = 'refuse' WHERE delivery = '4-default-1';
			INSERT INTO facts.failure VALUES (4, '4-default-1', 'server_error', clock(27), false);
			UPDATE facts.event SET attempts = `+attempts+` WHERE key = 'D'`)
		// Without an answer of the first request, D is POSTed before nothing that counts.
		if len(found) != want {
			t.Errorf("%s attempts are counted: %q", attempts, found)
		}
	}
}

// A receiver and a relay that had no processor for a while meet at the end of the relay's patience.
func TestCheckAllowsAnAnswerThatIsTooLate(t *testing.T) {
	t.Parallel()
	db := facts(t)
	for _, ended := range []string{"19", "20", "20.999"} {
		found := broken(t, db, `UPDATE facts.request SET fault = '' WHERE delivery = '3-default-1';
			UPDATE facts.failure SET reason = 'timeout', ended = clock(`+ended+`) WHERE delivery = '3-default-1'`)
		if len(found) > 0 {
			t.Errorf("the relay gave up at %s s what was answered at 20 s: %q", ended, found)
		}
	}
}

// dueBefore lets A become due after its commit, and D overtake it.
const dueBefore = `UPDATE facts.event SET due = clock(0) WHERE key = 'A'; UPDATE facts.request SET at = clock(19.999) WHERE delivery = '4-default-1'`

// What becomes due while a relay takes events of its key follows them, and what became due at about
// the same time has no certain order.
func TestCheckAllowsWhatBecomesDueMeanwhile(t *testing.T) {
	t.Parallel()
	db := facts(t)
	for _, lie := range []string{
		`UPDATE facts.invoice SET at = clock(1.05) WHERE key = 'D'`,
		`UPDATE facts.invoice SET at = clock(1.2) WHERE key = 'D';
			INSERT INTO facts.event VALUES (0, 'O', 'customer', 1, 'delivered', 1, '0-default-1', NULL);
			INSERT INTO facts.invoice VALUES ('O', clock(0.9)); INSERT INTO facts.processed VALUES ('O');
			INSERT INTO facts.shipment VALUES ('O', 'O', clock(1.9));
			INSERT INTO facts.request VALUES ('O', '0-default-1', clock(1.5), '', 201, false, clock(1.95));
			UPDATE facts.request SET at = clock(19.9) WHERE key = 'A'`,
	} {
		if found := broken(t, db, dueBefore+";"+lie); len(found) > 0 {
			t.Errorf("found %q in %s", found, lie)
		}
	}
}

// A checker that never failed proves nothing: each of these lies must be found out, and by the
// promise that it breaks.
func TestCheckFindsOut(t *testing.T) {
	t.Parallel()
	db := facts(t)
	for name, lie := range map[string]struct {
		plant string
		want  []string // parts of the breaches
	}{
		"an effect is lost": {
			`DELETE FROM facts.shipment WHERE key = 'A'; DELETE FROM facts.processed WHERE key = 'A'`,
			[]string{"lost: A is committed", "A: 1-default-1 was answered 201 before its effect"},
		},
		"an effect is doubled": {
			`INSERT INTO facts.shipment SELECT * FROM facts.shipment WHERE key = 'C'`,
			[]string{"doubled: C has 2 shipments"},
		},
		"an extra request without a cause": {
			`INSERT INTO facts.request VALUES ('A', '1-default-0', clock(0), '', 201, false, clock(20))`,
			[]string{"A: 1-default-0 is an extra request without a cause"},
		},
		"one claim is POSTed twice": {
			`INSERT INTO facts.request VALUES ('A', '1-default-1', clock(0), '', 201, false, clock(20))`,
			[]string{"A: 1-default-1 was POSTed twice"},
		},
		"a relay gives up an attempt that was answered": {
			`UPDATE facts.request SET fault = '' WHERE delivery = '3-default-1'`,
			[]string{"C: 3-default-1 was answered 201, yet the relay says network"},
		},
		"a relay does not see an answer that has been there for long": {
			`UPDATE facts.request SET fault = '' WHERE delivery = '3-default-1';
				UPDATE facts.failure SET reason = 'timeout', ended = clock(21) WHERE delivery = '3-default-1'`,
			[]string{"C: 3-default-1 was answered 201, yet the relay says timeout"},
		},
		"a receiver answered before it died": {
			`UPDATE facts.request SET status = 201, answered_at = clock(20) WHERE delivery = '5-default-1'`,
			[]string{"E: 5-default-1 was answered 201, yet the relay says network"},
		},
		"a living relay loses its claim": {
			`DELETE FROM demo_note WHERE what = 'killed'`,
			[]string{"D: relay-1.1 lost its claim 4-default-1, and it was not killed"},
		},
		"marked delivered though refused": {
			`UPDATE facts.request SET status = 500 WHERE delivery = '2-default-2'`,
			[]string{"B: delivered by 2-default-2, which was not answered 2xx"},
		},
		"marked delivered though the answer was lost": {
			`UPDATE facts.request SET fault = 'lose' WHERE delivery = '3-default-2'`,
			[]string{"C: delivered by 3-default-2, which was not answered 2xx"},
		},
		"marked delivered and never sent": {
			`DELETE FROM facts.request WHERE key = 'A'`,
			[]string{"A: delivered by 1-default-1, which was never on the wire", "D was POSTed before A was taken"},
		},
		"never delivered": {
			`UPDATE facts.event SET status = 'pending' WHERE key = 'A'`,
			[]string{"A is pending", "A: 1-default-1 is an extra request"},
		},
		"delivered to no receiver": {
			`UPDATE facts.event SET deliveries = 0 WHERE key = 'A'`,
			[]string{"A has 0 deliveries"},
		},
		"the event is missing": {
			`DELETE FROM facts.event WHERE key = 'A'`,
			[]string{"A has no event", "A is no committed event and was POSTed"},
		},
		"an attempt is not counted": {
			`UPDATE facts.event SET attempts = 1 WHERE key = 'B'`,
			[]string{"B: 1 attempts are counted, 2 were made"},
		},
		"a lost claim is counted as an attempt": {
			`UPDATE facts.event SET attempts = 2 WHERE key = 'D'`,
			[]string{"D: 2 attempts are counted, 1 were made"},
		},
		"answered before the commit": {
			`UPDATE facts.shipment SET at = clock(20.000001) WHERE key = 'A'`,
			[]string{"A: 1-default-1 was answered 201 before its effect was committed"},
		},
		"an effect of what was rolled back": {
			`INSERT INTO facts.shipment VALUES ('F', 'A', clock(2))`,
			[]string{"F is no committed invoice and has a shipment"},
		},
		"an event of what was rolled back": {
			`INSERT INTO facts.event VALUES (6, 'F', NULL, 1, 'pending', 0, '6-default-0')`,
			[]string{"F was rolled back and has an event"},
		},
		"an invoice that was rolled back": {
			`INSERT INTO demo_note VALUES ('rolled back', 'B')`,
			[]string{"B was rolled back and is an invoice", "B was rolled back and has an event"},
		},
		"a request for what was rolled back": {
			`INSERT INTO facts.request VALUES ('F', '6-default-1', clock(0), '', 0, false, clock(0))`,
			[]string{"F is no committed event and was POSTed"},
		},
		"a memory without its effect": {
			`INSERT INTO facts.processed VALUES ('G')`,
			[]string{"G is processed and not shipped"},
		},
		"an effect without its memory": {
			`DELETE FROM facts.processed WHERE key = 'A'`,
			[]string{"A is shipped and not processed"},
		},
		"a later one of its key is sent before the earlier one was taken": {
			`UPDATE facts.request SET at = clock(19.999) WHERE delivery = '4-default-1'`,
			[]string{"D was POSTed before A was taken"},
		},
		"a later one of its key is sent though the earlier one was never taken": {
			`UPDATE facts.request SET status = 500 WHERE delivery = '1-default-1'`,
			[]string{"A: delivered by 1-default-1, which was not answered 2xx", "D was POSTed before A was taken"},
		},
		"a later one of its key has its effect first": {
			`UPDATE facts.shipment SET at = clock(1.999999) WHERE key = 'D'`,
			[]string{"the effect of D came before that of A"},
		},
		"an event is sent before it is due": {
			`UPDATE facts.event SET due = clock(26.5) WHERE key = 'D'`,
			[]string{"D was POSTed before it was due"},
		},
		"a later one of its key becomes due first, and waits": {
			`UPDATE facts.event SET due = clock(2) WHERE key = 'D'; UPDATE facts.event SET due = clock(3) WHERE key = 'A';
				UPDATE facts.request SET at = clock(4) WHERE key = 'A'; UPDATE facts.shipment SET at = clock(5) WHERE key = 'A'`,
			[]string{"A, due later, was POSTed before D, due later, was taken", "the effect of A, due later, came before that of D, due later,"},
		},
		"one that became due before a later one of its key was inserted waits": {
			`UPDATE facts.event SET due = clock(2) WHERE key = 'A'; UPDATE facts.event SET began = clock(3) WHERE key = 'D';
				UPDATE facts.invoice SET at = clock(3) WHERE key = 'D'; UPDATE facts.request SET at = clock(27), answered_at = clock(28) WHERE key = 'A';
				UPDATE facts.shipment SET at = clock(27.5) WHERE key = 'A'`,
			[]string{"D was POSTed before A, due later, was taken", "the effect of D came before that of A, due later,"},
		},
		"a producer commits a key's events in another order than that of their ids": {
			`UPDATE facts.invoice SET at = clock(0.999999) WHERE key = 'D'`,
			[]string{"D was committed before A, and has the larger id"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found := broken(t, db, lie.plant)
			if len(found) != len(lie.want) {
				t.Fatalf("found %q, want %q", found, lie.want)
			}
			for _, want := range lie.want {
				if !slices.ContainsFunc(found, func(b string) bool { return strings.Contains(b, want) }) {
					t.Errorf("found %q, want %q", found, want)
				}
			}
		})
	}
}

func TestFaultsAreDrawnAsOften(t *testing.T) {
	t.Parallel()
	f := faults{Late: 0.1, Refuse: 0.2, Lose: 0.3}
	const draws = 10_000
	draw := func() map[fault]int {
		counts := map[fault]int{}
		for n := range draws {
			kind, late := f.pick(7, string(rune('a'+n%26))+thousands(n))
			counts[kind]++
			if (kind == faultLate) != (late > 0) || late > latest {
				t.Fatalf("fault %q is %s late", kind, late)
			}
		}
		return counts
	}
	counts := draw()
	for kind, share := range map[fault]float64{faultLate: 0.1, faultRefuse: 0.2, faultLose: 0.3, faultNone: 0.4} {
		if got := float64(counts[kind]) / draws; got < share-0.03 || got > share+0.03 {
			t.Errorf("fault %q has a share of %.3f, want %.2f", kind, got, share)
		}
	}
	for kind, n := range draw() {
		if n != counts[kind] {
			t.Errorf("the same seed drew fault %q another number of times", kind)
		}
	}
}
