package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"hash/fnv"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

var inboxTime = flag.Duration("inbox", 15*time.Second, "how long TestInboxChaos makes faults")

// The faults of TestChaos, while receivers record events and work them later, and are killed after
// each fault. Handlers fail, and an operator replays what they refused.
func TestInboxChaos(t *testing.T) {
	testsize.Long(t)
	s := openStage(t, chosenSeed(t), true)
	s.Go(s.replayRefused)
	events := s.endureFaults(*inboxTime).events
	n := all(s, s.inbox, selectInboxFigures, pgx.RowToStructByPos[inboxFigures])[0]
	refused := int(s.replayed.Load())
	n.CutOff -= refused // a replay takes the attempt back
	t.Logf("inbox: %d events, %d effects, %d receivers killed, %d lost, %d doubled, %d stuck; %d claims were cut off; handlers failed %d times, refused %d events, ignored %d",
		events, n.Effects, s.made[receiverKilled.name], events-n.Effects+n.Doubled, n.Doubled, n.Stuck, n.CutOff, n.Failed, refused, n.Ignored)
	if n.CutOff == 0 || n.Failed == 0 || n.Ignored == 0 || refused == 0 {
		t.Error("a kind of failure did not occur")
	}
}

type inboxFigures struct{ Effects, Doubled, Stuck, CutOff, Failed, Ignored int }

const selectInboxFigures = `
SELECT (SELECT count(*) FROM effects), (SELECT count(*) - count(DISTINCT key) FROM effects),
       count(*) FILTER (WHERE processing_state NOT IN ('succeeded', 'ignored')), sum(claim - attempts)::int, sum(attempts - 1)::int,
       count(*) FILTER (WHERE processing_state = 'ignored')
FROM inbox_events`

// What the handler of a receiver that records events does to an event, beyond its effect.
type fate int

const (
	succeed fate = iota
	pause        // so that a kill comes in the middle
	fail         // the first attempt
	retryAfter50ms
	panics
	endsGoroutine
	refuse // for good, until an operator replays the event
	ignore
)

const producersKey = "sale-" // as newSale has it

// fateOf returns the fate of an event of a producer. It is the same in each attempt.
func fateOf(key string) fate {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key))
	n := h.Sum32() % 1000
	switch {
	case !strings.HasPrefix(key, producersKey):
		return succeed
	case n < 100:
		return pause
	case n < 105:
		return fail
	case n < 108:
		return retryAfter50ms
	case n < 111:
		return panics
	case n < 114:
		return endsGoroutine
	case n < 116:
		return refuse
	case n < 121:
		return ignore
	}
	return succeed
}

const (
	// insertWorked looks, besides, for an earlier event of the ordering key that is not done. An
	// index answers each question.
	insertWorked = `INSERT INTO effects (key, early) VALUES ($1, ` +
		earlier + `(processing_state = 'processing' OR processing_state = 'pending' AND next_attempt_at IS NOT NULL)) OR ` +
		earlier + `processing_state = 'pending' AND next_attempt_at IS NULL) OR ` +
		earlier + `processing_state = 'failed'))`
	earlier = `EXISTS (SELECT FROM inbox_events WHERE receiver = $2 AND source = $3 AND ordering_key = $4 AND sequence < $5 AND `

	selectAttempts = `SELECT attempts, coalesce(last_error, '') FROM inbox_events WHERE receiver = $1 AND source = $2 AND idempotency_key = $3`
)

var errRefused = errors.New("this cannot be done")

// workEvent is the handler of a receiver that records events: it writes the effect of an event, and
// meets its fate then.
func workEvent(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	var sold payload
	if err := json.Unmarshal(event.Payload, &sold); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, insertWorked, sold.Key, event.Receiver, event.Source, event.OrderingKey, event.Sequence); err != nil {
		return err
	}
	does := fateOf(event.IdempotencyKey)
	switch does {
	case succeed:
		return nil
	case pause:
		_, err := tx.Exec(ctx, `SELECT pg_sleep(0.02)`)
		return err
	case ignore:
		return consumer.Ignore("of no concern")
	}
	var attempts int
	var last string
	if err := tx.QueryRow(ctx, selectAttempts, event.Receiver, event.Source, event.IdempotencyKey).Scan(&attempts, &last); err != nil {
		return err
	}
	switch {
	case does == refuse && !strings.Contains(last, errRefused.Error()):
		return consumer.Permanent(errRefused)
	case does == refuse || attempts > 0:
	case does == retryAfter50ms:
		return consumer.RetryAfter(errors.New("the lorry is away"), 50*time.Millisecond)
	case does == panics:
		panic("the shelf fell over")
	case does == endsGoroutine:
		runtime.Goexit()
	default:
		return errors.New("out of cardboard")
	}
	return nil
}

const selectRefused = `SELECT inbox_id FROM inbox_events WHERE processing_state = 'failed' AND last_error LIKE '%' || $1 || '%'`

// replayRefused replays, as an operator, what handlers refused, and nothing that failed otherwise.
func (s *stage) replayRefused(ctx context.Context) error {
	ops := inboxops.New(s.inbox)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		rows, _ := s.inbox.Query(ctx, selectRefused, errRefused.Error()) // its error comes with the rows
		refused, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil || len(refused) == 0 {
			continue // the database may be down
		}
		done, _ := ops.Replay(ctx, inboxops.Selection{IDs: refused}, nil)
		s.replayed.Add(done.Done)
	}
}

const selectWork = `
SELECT idempotency_key, processing_state, attempts, coalesce(early, false)
FROM inbox_events LEFT JOIN (SELECT key, bool_or(early) AS early FROM effects GROUP BY key) e ON key = idempotency_key`

// worked reads what became of recorded events.
func (s *stage) worked() []history.Work {
	s.t.Helper()
	return all(s, s.inbox, selectWork, func(row pgx.CollectableRow) (w history.Work, err error) {
		err = row.Scan(&w.Key, &w.State, &w.Attempts, &w.Early)
		w.End, w.Counted = "succeeded", 1            // a replay counts from the beginning
		if !strings.HasPrefix(w.Key, producersKey) { // of a test that refuses statements, as a handler's error
			w.Counted = w.Attempts
		}
		switch fateOf(w.Key) {
		case ignore:
			w.End = "ignored"
		case fail, retryAfter50ms, panics, endsGoroutine:
			w.Counted = 2
		}
		return w, err
	})
}
