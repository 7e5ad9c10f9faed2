package migrations_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A producer who numbers events makes those of others fail or wait; one who dates them makes
// partitions of the archive; no relay would find an event with another transaction's id.
func TestSecurityProducersChooseNeitherIdNorTime(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	s.as("producer").refused(insufficientPrivilege,
		`INSERT INTO outbox (id, event_type, payload, idempotency_key) OVERRIDING SYSTEM VALUE VALUES (2, 't', '1', 'k')`,
		`INSERT INTO outbox (id, event_type, payload, idempotency_key) OVERRIDING USER VALUE VALUES (2, 't', '1', 'k')`,
		`INSERT INTO outbox (event_type, payload, idempotency_key, created_at) VALUES ('t', '1', 'k', '2001-01-01')`,
		`INSERT INTO outbox (event_type, payload, idempotency_key, created_at) VALUES ('t', '1', 'k', DEFAULT)`,
		`INSERT INTO outbox (event_type, payload, idempotency_key, xid) VALUES ('t', '1', 'k', '2')`,
		`INSERT INTO outbox OVERRIDING SYSTEM VALUE SELECT i, 't', 1, '1', i::text FROM generate_series(2, 1000) i`,
		`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k') ON CONFLICT (idempotency_key) DO UPDATE SET created_at = now()`,
		`SELECT setval('outbox_id_seq', 1000)`, `SELECT nextval('outbox_id_seq')`,
		`DO $$ BEGIN LOCK TABLE outbox IN ROW EXCLUSIVE MODE; END $$`,
	)
	for _, columns := range []string{``, `(id, event_type, payload, idempotency_key)`, `(event_type, payload, idempotency_key, created_at)`} {
		_, err := s.as("producer").conn.PgConn().CopyFrom(t.Context(), strings.NewReader(""), `COPY outbox `+columns+` FROM STDIN`)
		if err == nil || !strings.Contains(err.Error(), insufficientPrivilege) {
			t.Errorf("COPY outbox %s ended with %v", columns, err)
		}
	}
	// Rights that a version before granted are taken back.
	owner := s.as("shop_owner")
	owner.exec(`GRANT INSERT ON outbox TO outbox_producer; GRANT ALL ON outbox_delivery, outbox_attempt TO outbox_relay`)
	pgtest.Must(t, s.applyRoles("shop_owner"))
	s.as("producer").refused(insufficientPrivilege, `INSERT INTO outbox (id, event_type, payload, idempotency_key) OVERRIDING SYSTEM VALUE VALUES (2, 't', '1', 'k')`)
	s.as("relay").refused(insufficientPrivilege, `DELETE FROM outbox_delivery`, `DELETE FROM outbox_attempt`)
	// Not even the owner makes an archive of thousands of months.
	owner.refused(checkViolation,
		`INSERT INTO outbox (event_type, payload, idempotency_key, created_at) VALUES ('t', '1', 'k', '1999-12-31 00:00+00')`)
}

// A restore without the rights of PUBLIC, and a script that takes them, leave producers what the
// roles give them; one that gives PUBLIC everything gives producers no more.
func TestSecurityRolesNeedNothingOfPublic(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	s.superuser(`REVOKE ALL ON ALL TABLES IN SCHEMA public FROM PUBLIC; REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM PUBLIC;
		REVOKE ALL ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC`)
	pgtest.Must(t, s.applyRoles("shop_owner"))
	s.as("producer").exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k')`)
	s.superuser(`SELECT setval('outbox_armed', 99999999999999)`)
	s.as("producer").exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'armed')`)
	s.superuser(`GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO PUBLIC`)
	pgtest.Must(t, s.applyRoles("shop_owner"))
	s.as("producer").refused(insufficientPrivilege, `SELECT outbox_order_reveal(1, 'a', 'b')`, `SELECT outbox_reveal(1)`, `SELECT outbox_cover_events(0, 1, '3:3:')`)
	s.as("producer").exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'again')`)
}

// Every way in which producers insert events works with the columns that they have.
func TestProducersInsertWithTheirColumns(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	producer := s.as("producer")
	producer.exec(`
		INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'plain');
		INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'plain') ON CONFLICT DO NOTHING;
		INSERT INTO outbox (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, available_at)
			VALUES ('t', 2, '1', 'all', 'o', 'r', '{"a": "b"}', now() + interval '1 hour')`)
	tag, err := producer.conn.PgConn().CopyFrom(t.Context(), strings.NewReader("t\t1\tcopied\n"), `COPY outbox (event_type, payload, idempotency_key) FROM STDIN`)
	if err != nil || tag.RowsAffected() != 1 {
		t.Errorf("COPY: %v, %v", tag, err)
	}
	s.as("reader").wants("all copied plain", `SELECT string_agg(idempotency_key, ' ' ORDER BY idempotency_key) FROM outbox`)
}

// What docs/reference.md says of events that were refused as forgotten needs exactly the roles that
// it names.
func TestForgottenEventIsSentAgain(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/reference.md")
	pgtest.Must(t, err)
	_, section, _ := strings.Cut(string(page), "### Refused as forgotten\n")
	section, _, _ = strings.Cut(section, "\n## ")
	_, statement, _ := strings.Cut(section, "```sql\n")
	statement, _, _ = strings.Cut(statement, "```")
	named := regexp.MustCompile("`(outbox_[a-z]+)`").FindAllStringSubmatch(section, -1)
	if len(named) < 2 {
		t.Fatalf("the page names %q", named)
	}
	s := newShop(t, migrations.Outbox)
	s.as("producer").exec(`INSERT INTO outbox (event_type, payload, idempotency_key, headers) VALUES ('t', '"secret"', 'KEY', '{"a": "b"}')`)
	for i := range 2 {
		login := []string{"first", "second"}[i]
		s.superuser(fmt.Sprintf(`CREATE ROLE %s LOGIN; GRANT %s TO %[1]s`, login, named[i][1]))
		s.as(login).refused(insufficientPrivilege, statement) // one of them is not enough
	}
	s.superuser(fmt.Sprintf(`CREATE ROLE third LOGIN; GRANT %s, %s TO third`, named[0][1], named[1][1]))
	s.as("third").exec(statement)
	s.as("shop_owner").wants(`"secret" {"a": "b"}`, `SELECT payload || ' ' || headers::text FROM outbox WHERE idempotency_key = 'KEY-again'`)
}

// The role of a relay settles everything, archives it and drops the archive: no event may be gone,
// or be archived within a day.
func TestSecurityRelayCannotDestroyEvents(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox, migrations.Inbox)
	owner, relay := s.as("shop_owner"), s.as("relay")
	owner.exec(`
		INSERT INTO outbox (event_type, payload, idempotency_key, created_at) VALUES
			('t', '1', 'new', now()), ('t', '1', 'hours ago', now() - interval '23 hours'), ('t', '1', 'months ago', now() - interval '100 days');
		INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason)
			VALUES (1, 1, now() - interval '23 hours', 1, 1, 1, '', 'retry', 'x');
		INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at) VALUES ('test', 's', 'k', 'succeeded', now() - interval '23 hours');
		` + cover)
	relay.exec(`UPDATE outbox_delivery SET status = 'discarded', last_attempt_at = NULL, next_attempt_at = '2001-01-01'`)
	// Ages that compare as zero, or as a day, and lead into the future.
	ages := []string{`-1 day`, `0`, `23 hours 59 minutes`, `1 mon -31 days`, `1 mon -29 days -100 years`, `12 mons -365 days -1 hour`, `-24 hours`}
	for _, age := range append(ages, "NULL") {
		age = strings.ReplaceAll("'"+age+"'", "'NULL'", "NULL")
		for _, dryRun := range []string{"false", "true"} {
			relay.refused(invalidParameter,
				fmt.Sprintf(`SELECT outbox_archive_batch(0, 100, %s, %s)`, age, dryRun),
				fmt.Sprintf(`SELECT outbox_prune_attempts(0, 100, %s, %s)`, age, dryRun),
				fmt.Sprintf(`SELECT outbox_prune_processed_events(0, 100, %s, %s)`, age, dryRun),
				fmt.Sprintf(`SELECT outbox_drop_archive(%s, %s, '')`, age, dryRun))
		}
	}
	relay.refused(invalidParameter, `SELECT outbox_drop_archive('29 days 23 hours', false, '')`, `SELECT outbox_drop_archive('1 mon -2 days', false, '')`)

	// What is left to it: an event of months ago moves, and stays where it moved to.
	relay.wants("1", `SELECT settled FROM outbox_archive_batch(0, 100, '24 hours', false)`)
	relay.exec(`SELECT outbox_prune_attempts(0, 100, '24 hours', false)`)
	relay.wants("NULL", `SELECT coalesce(outbox_drop_archive('30 days', false, ''), 'NULL')`)
	owner.wants("hours ago, months ago, new", `SELECT string_agg(idempotency_key, ', ' ORDER BY idempotency_key)
		FROM (SELECT idempotency_key FROM outbox UNION ALL SELECT idempotency_key FROM outbox_archive) e`)
	owner.wants("1 1", `SELECT concat((SELECT count(*) FROM outbox_attempt), ' ', (SELECT count(*) FROM processed_events))`)

	relay.refused(insufficientPrivilege,
		`DELETE FROM outbox_delivery`, `INSERT INTO outbox_delivery (event_id, destination, replay) VALUES (1, 'x', true)`, `TRUNCATE outbox_delivery`,
		`UPDATE outbox_range SET target = base`, `UPDATE outbox_range SET seq = seq + 1`, `TRUNCATE outbox_range`, `DELETE FROM outbox_intake`,
		`UPDATE outbox_delivery SET event_id = event_id + 1`, `UPDATE outbox_delivery SET destination = 'x'`,
		`UPDATE outbox_delivery SET ordering_key = 'x'`, `UPDATE outbox_delivery SET payload_bytes = 0`,
		`DELETE FROM outbox_attempt`, `UPDATE outbox_attempt SET reason = ''`,
		`DELETE FROM outbox`, `UPDATE outbox SET event_type = 'x'`, `DELETE FROM outbox_archive`, `UPDATE outbox_archive SET archived_at = '2001-01-01'`,
		`DO $$ BEGIN LOCK TABLE outbox_archive IN SHARE UPDATE EXCLUSIVE MODE; END $$`, `DROP TABLE outbox_archive`)
	// The archive drops it once it has kept it for 30 days.
	owner.exec(`UPDATE outbox_archive SET archived_at = now() - interval '31 days'`)
	relay.wants("false", `SELECT (outbox_drop_archive('30 days', false, '') IS NULL)::text`)
}

// A snapshot from before a batch does not see what was archived since: a month may not be dropped
// by it.
func TestSecurityArchiveIsNotDroppedByAnOldSnapshot(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	s.as("shop_owner").exec(`
		INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at) VALUES ('t', '1', 'k', '2025-01-15', '2025-01-15');
		CREATE TABLE outbox_archive_202501 PARTITION OF outbox_archive FOR VALUES FROM ('2025-01-01 00:00+00') TO ('2025-02-01 00:00+00');
		` + cover)
	relay, archives := s.as("relay"), s.as("relay")
	relay.exec(`UPDATE outbox_delivery SET status = 'discarded', next_attempt_at = '2025-01-15'`)
	relay.exec(`BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM outbox`)
	archives.wants("1", `SELECT settled FROM outbox_archive_batch(0, 100, '24 hours', false)`)
	relay.refused("25000", `SELECT outbox_drop_archive('30 days', false, '')`)
	relay.exec(`ROLLBACK`)
	s.as("reader").wants("k", `SELECT idempotency_key FROM outbox_archive`)
}

// A login with CONNECT alone holds every lock that it can take: retention continues.
func TestSecurityStrangerCannotStopRetention(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	s.as("shop_owner").exec(`
		INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at) VALUES ('t', '1', 'k', '2025-01-15', '2025-01-15');
		` + cover + `;
		UPDATE outbox_delivery SET status = 'discarded', next_attempt_at = '2025-01-15'`)
	stranger := s.as("stranger")
	// What a session could look up or guess: the oid of any relation of the schema, with the small
	// numbers behind it.
	stranger.exec(`SELECT count(pg_advisory_lock(c.oid::integer, n)) FROM pg_class c, generate_series(0, 3) n WHERE c.relnamespace = 'public'::regnamespace`)
	stranger.refused(insufficientPrivilege, `DO $$ BEGIN LOCK TABLE outbox_archive IN ACCESS SHARE MODE; END $$`, `SELECT FROM outbox_archive`, `SELECT FROM outbox_archive FOR UPDATE`)
	reader := s.as("reader")
	reader.refused(insufficientPrivilege, `DO $$ BEGIN LOCK TABLE outbox_archive IN ROW SHARE MODE; END $$`, `DO $$ BEGIN LOCK TABLE outbox_archive IN SHARE UPDATE EXCLUSIVE MODE; END $$`,
		`SELECT FROM outbox_archive FOR KEY SHARE`)
	reader.exec(`BEGIN; SELECT id FROM outbox_archive`)
	relay := s.as("relay")
	relay.wants("true 1", `SELECT concat(mine::text, ' ', settled) FROM outbox_archive_batch(0, 100, '24 hours', false)`)
	relay.wants("true", `SELECT mine::text FROM outbox_prune_attempts(0, 100, '24 hours', false)`)
	relay.wants("true", `SELECT mine::text FROM outbox_prune_processed_events(0, 100, '24 hours', false)`)
}

// Sessions that archive exclude each other, and the second does not wait.
func TestOneSessionArchives(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	first, second := s.as("relay"), s.as("relay")
	first.exec(`BEGIN`)
	first.wants("true", `SELECT mine::text FROM outbox_archive_batch(0, 100, '24 hours', false)`)
	second.wants("false", `SELECT mine::text FROM outbox_archive_batch(0, 100, '24 hours', false)`)
	second.wants("false", `SELECT mine::text FROM outbox_prune_attempts(0, 100, '24 hours', false)`)
	second.wants("false", `SELECT mine::text FROM outbox_prune_processed_events(0, 100, '24 hours', false)`)
	second.refused("55P03", `SELECT outbox_drop_archive('30 days', false, '')`)
	second.wants("true", `SELECT mine::text FROM outbox_archive_batch(0, 100, '24 hours', true)`)
	first.exec(`COMMIT`)
	second.wants("true", `SELECT mine::text FROM outbox_archive_batch(0, 100, '24 hours', false)`)
}

// What operators did stays as it was written: the login of a relay carries an operation on, and
// rewrites neither it nor one that is done.
func TestSecurityRelayCannotRewriteTheAudit(t *testing.T) {
	t.Parallel()
	const integrityViolation = "23000"
	s := newShop(t, migrations.Outbox)
	relay := s.as("relay")
	relay.exec(`
		INSERT INTO outbox_audit (actor, origin, action) VALUES ('ann', 'cli', 'pause');
		INSERT INTO outbox_audit (actor, origin, action, state, selection, matched) VALUES ('ann', 'cli', 'replay', 'running', '{}', 3);
		UPDATE outbox_audit SET done = done + 2, updated_at = clock_timestamp() WHERE id = 2`)
	relay.refused(insufficientPrivilege, `UPDATE outbox_audit SET actor = 'bob'`, `UPDATE outbox_audit SET matched = 1 WHERE id = 2`, `DELETE FROM outbox_audit`, `TRUNCATE outbox_audit`)
	relay.refused(integrityViolation,
		`UPDATE outbox_audit SET detail = 'nothing happened' WHERE id = 1`, `UPDATE outbox_audit SET state = 'running' WHERE id = 1`,
		`UPDATE outbox_audit SET updated_at = now() WHERE id = 1`, `UPDATE outbox_audit SET done = 1 WHERE id = 2`,
		`UPDATE outbox_audit SET updated_at = '2001-01-01' WHERE id = 2`)
	relay.exec(`UPDATE outbox_audit SET state = 'interrupted', updated_at = clock_timestamp() WHERE id = 2`)
	relay.refused(integrityViolation, `UPDATE outbox_audit SET state = 'done' WHERE id = 2`, `UPDATE outbox_audit SET done = 3 WHERE id = 2`, `UPDATE outbox_audit SET detail = 'x' WHERE id = 2`)
	relay.exec(`
		UPDATE outbox_audit SET state = 'running', detail = NULL WHERE id = 2;
		UPDATE outbox_audit SET done = 3 WHERE id = 2;
		UPDATE outbox_audit SET state = 'done' WHERE id = 2`)
	relay.refused(integrityViolation, `UPDATE outbox_audit SET done = 0`, `UPDATE outbox_audit SET state = 'failed' WHERE id = 2`)
	s.as("shop_owner").refused(integrityViolation, `UPDATE outbox_audit SET actor = 'bob' WHERE id = 2`)
}

// A reader sees what happened to events, and nothing of what they say. Support sees it, one event
// at a time, and not before the audit has it: what is undone reveals nothing, nor does the entry of
// another login, or an old one.
func TestSecurityContentIsRevealedWithAnAudit(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	s.as("shop_owner").exec(`INSERT INTO outbox (event_type, payload, idempotency_key, headers) VALUES ('t', '"secret"', 'k', '{"x-event-token": "secret"}')`)
	s.as("reader").refused(insufficientPrivilege, `SELECT payload FROM outbox`, `SELECT headers FROM outbox`, `SELECT outbox FROM outbox`, `SELECT payload FROM outbox_archive`,
		`SELECT outbox_order_reveal(1, '', 'cli')`, `SELECT outbox_reveal(1)`)
	s.as("reader").wants("8 {x-event-token}", `SELECT payload_bytes || ' ' || header_names::text FROM outbox_outline(1)`)
	s.as("producer").refused(insufficientPrivilege, `SELECT payload FROM outbox`, `SELECT outbox_outline(1)`, `SELECT outbox_reveal(1)`)
	support := s.as("support")
	const reveal = `SELECT coalesce(string_agg(payload || headers::text, ''), 'nothing') FROM outbox_reveal(%d)`
	support.refused(insufficientPrivilege, `SELECT payload FROM outbox`, `INSERT INTO outbox_audit (actor, origin, action, event_id) VALUES ('ann', 'cli', 'reveal_payload', 1)`)
	support.exec(`BEGIN; SELECT outbox_order_reveal(1, 'ann', 'cli'); SAVEPOINT s; SELECT outbox_order_reveal(1, 'ann', 'cli'); RELEASE s`)
	support.wants("nothing", fmt.Sprintf(reveal, 1))
	support.wants("nothing", fmt.Sprintf(reveal, 2))
	support.exec(`ROLLBACK`)
	support.exec(`SELECT outbox_order_reveal(1, 'ann', 'cli')`)
	support.wants(`"secret"{"x-event-token": "secret"}`, fmt.Sprintf(reveal, 3))
	s.as("relay").wants("nothing", fmt.Sprintf(reveal, 3))
	s.as("shop_owner").wants("ann cli reveal_payload 1 login support", `SELECT concat_ws(' ', actor, origin, action, event_id, detail) FROM outbox_audit`)
	s.superuser(`ALTER TABLE outbox_audit DISABLE TRIGGER ALL; UPDATE outbox_audit SET at = now() - interval '2 minutes'`)
	support.wants("nothing", fmt.Sprintf(reveal, 3))
}
