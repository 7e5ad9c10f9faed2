package receivertest

import (
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

// Day has 24 hours, as the memory of events counts it.
const Day = 24 * time.Hour

// Ninety returns the usual memory: 90 days.
func Ninety() consumer.PruneConfig {
	return consumer.PruneConfig{Receiver: "test", Retention: 90 * Day}
}

// Old are events of 91 days ago: n rows that a middleware left, and their effects.
func (e *Env) Old(source, key string, n int) {
	e.T.Helper()
	e.MustExec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, processed_at, payload_hash)
		SELECT 'test', $1, $2 || i, 'succeeded', now() - interval '91 days', now() - interval '91 days', sha256('{}') FROM generate_series(1, $3) i`, source, key, n)
	e.MustExec(`INSERT INTO effect SELECT $1 || i FROM generate_series(1, $2) i`, key, n)
}

// LongAgo is when such an event was created.
func LongAgo() func(http.Header) { return Created(time.Now().Add(-91*Day - time.Minute)) }

// MustPrune prunes with the receiver's driver.
func (e *Env) MustPrune(cfg consumer.PruneConfig) consumer.Pruned {
	e.T.Helper()
	done, err := e.Prune(e.T.Context(), e, cfg)
	pgtest.Must(e.T, err)
	return done
}

// WantPruned prunes and compares.
func (e *Env) WantPruned(cfg consumer.PruneConfig, removed, announced int64) consumer.Pruned {
	e.T.Helper()
	done := e.MustPrune(cfg)
	if done.Removed != removed || done.Announced != announced {
		e.T.Errorf("pruned %+v, want %d removed, %d announced", done, removed, announced)
	}
	return done
}

// Settle lets two minutes pass since the last announcement.
func (e *Env) Settle() {
	e.T.Helper()
	// Once each: a statement that writes the row announces it again, to all transactions that run.
	e.MustExec(`UPDATE inbox_forgotten SET announced_at = announced_at - interval '2 minutes' WHERE announced_at > now() - interval '1 minute'`)
}

// Known returns how many events are remembered.
func (e *Env) Known() int {
	e.T.Helper()
	return e.Count(`SELECT count(*) FROM processed_events`)
}
