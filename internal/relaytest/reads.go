package relaytest

// The server counts the reads of a session's last transactions in pg_stat_xact_user_tables too,
// until it has passed them on: at most once a second. So a transaction notes what it finds, and
// counts from there.
const (
	NoteReads  = `CREATE TEMP TABLE noted ON COMMIT DROP AS SELECT relid, seq_scan, idx_tup_fetch FROM pg_stat_xact_user_tables`
	SinceNoted = `(SELECT x.relname, x.seq_scan - n.seq_scan AS seq_scan, x.idx_tup_fetch - n.idx_tup_fetch AS idx_tup_fetch
		FROM pg_stat_xact_user_tables x JOIN pg_temp.noted n USING (relid)) reads`
)

// InsertOld adds events with the keys prefix-1 … prefix-n: created 40 days ago and delivered, to
// every route, 35 days ago.
func (db *Database) InsertOld(n int, prefix string) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at)
		SELECT 't', '{"n": 1}', $1 || '-' || i, now() - interval '40 days', now() - interval '40 days' FROM generate_series(1, $2) i`, prefix, n)
	db.Exec(`UPDATE outbox_delivery d SET status = 'delivered', delivered_at = now() - interval '35 days', attempts = 1,
		next_attempt_at = now() - interval '40 days', last_attempt_at = now() - interval '35 days'
		FROM outbox o WHERE o.id = d.event_id AND o.idempotency_key LIKE $1 || '-%'`, prefix)
}

// Load adds n events without deliveries, as when their deliveries were lost, and returns their ids.
func (db *Database) Load(n int, prefix string) (ids []int64) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, xid)
		SELECT 't', '{"n": 1}', $1 || '-' || i, '2' FROM generate_series(1, $2) i`, prefix, n)
	db.Exec(`DELETE FROM outbox_delivery d USING outbox o WHERE d.event_id = o.id AND o.idempotency_key LIKE $1 || '-%'`, prefix)
	return Rows[int64](db, `SELECT id FROM outbox WHERE idempotency_key LIKE $1 || '-%' ORDER BY id`, prefix)
}
