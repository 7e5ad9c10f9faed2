package outbox_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/outbox"
)

// The rights that migrations/roles.sql gives, by relation or function and by login: "producer:
// insert; reader: select". Whatever is not listed is refused. "all" is select, insert, update and
// delete.
var promised = map[string]string{
	"outbox":                   "producers: insert; relay: select; reader: select",
	"outbox_archive":           "relay: select; reader: select",
	"outbox_archive_202001":    "", // reached through outbox_archive alone
	"outbox_delivery":          "relay: select insert update; reader: select",
	"outbox_range":             "relay: all; reader: select",
	"outbox_intake":            "relay: select update; reader: select",
	"outbox_route":             "relay: select insert delete; reader: select",
	"outbox_destination":       "relay: select insert update; reader: select",
	"outbox_attempt":           "relay: select insert; reader: select",
	"outbox_relay":             "relay: all; reader: select",
	"outbox_relay_destination": "relay: all; reader: select",
	"outbox_relay_route":       "relay: all; reader: select",
	"outbox_alert":             "relay: all; reader: select",
	"outbox_alert_notice":      "relay: all; reader: select",
	"outbox_alert_silence":     "relay: all; reader: select",
	"outbox_alert_past":        "relay: select insert delete; reader: select",
	"outbox_history":           "relay: all; reader: select",
	"outbox_rescue":            "relay: all; reader: select",
	"outbox_void":              "relay: all; reader: select",
	"outbox_audit":             "relay: select insert update; reader: select",
	"outbox_identity":          "relay: select insert update; reader: select",
	"outbox_watch":             "relay: select update; reader: select",
	"outbox_undelivered":       "relay: select update; reader: select",
	"outbox_schema_version":    "relay: select; reader: select",
	"processed_events":         "receiver: all",
	"inbox_events":             "receiver: all",
	"inbox_freshness":          "receiver: all",
	"inbox_forgotten":          "receiver: select insert update",
	"inbox_schema_version":     "receiver: select",

	"outbox_audit_id_seq":          "",
	"outbox_alert_past_id_seq":     "",
	"outbox_armed":                 "producers: select; relay: select update; reader: select; support: select; receiver: select; stranger: select",
	"outbox_id_seq":                "",
	"outbox_attempt_id_seq":        "",
	"outbox_relay_id_seq":          "",
	"outbox_schema_version_id_seq": "",
	"inbox_schema_version_id_seq":  "",
	"inbox_id_seq":                 "receiver: usage",

	"outbox_archive_batch(bigint,integer,interval,boolean)":                       "relay: execute",
	"outbox_drop_archive(interval,boolean,text)":                                  "relay: execute",
	"outbox_prune_attempts(bigint,integer,interval,boolean)":                      "relay: execute",
	"outbox_prune_processed_events(bigint,integer,interval,boolean)":              "relay: execute",
	"outbox_create_deliveries(bigint,integer)":                                    "relay: execute",
	"outbox_release_parked(bigint,bigint)":                                        "relay: execute",
	"outbox_archive_partitions()":                                                 "",
	"outbox_cover_events(bigint,integer,pg_snapshot)":                             "relay: execute",
	"outbox_is_routed(bigint)":                                                    "relay: execute; reader: execute",
	"outbox_outline(bigint)":                                                      "relay: execute; reader: execute",
	"outbox_order_reveal(bigint,text,text)":                                       "relay: execute; support: execute",
	"outbox_reveal(bigint)":                                                       "relay: execute; support: execute",
	"outbox_compare_events(text[],integer[],json[],text[],text[],text[],jsonb[])": "producers: execute",
	"outbox_count_change()":                                                       "",
	"outbox_refuse_delivery()":                                                    "",
	"outbox_refuse_truncate()":                                                    "",
	"processed_events_keep()":                                                     "",
	"inbox_has_payload(bigint)":                                                   "receiver: execute",
	// The default of a column calls it for the producer. It tells relays no more than NOTIFY, which
	// each session may use.
	"outbox_wake()": everyone,
	// These run with the rights of the caller, on nothing but what the caller gives them.
	"inbox_reset()":                                     everyone,
	"outbox_refuse_update()":                            everyone,
	"outbox_keep_audit()":                               everyone,
	"outbox_alert_changed()":                            everyone,
	"outbox_route_added()":                              everyone,
	"outbox_compatible_since()":                         everyone,
	"inbox_compatible_since()":                          everyone,
	"inbox_prune(text,bigint,integer,interval,boolean)": everyone,
}

const everyone = "producers: execute; relay: execute; reader: execute; support: execute; receiver: execute; stranger: execute"

// The columns of a right, by login, right and table, in the order of the table. Whatever is not
// listed covers all columns.
var promisedColumns = map[string]string{
	"producer insert outbox":       columnsOfProducers,
	"neighbour insert outbox":      columnsOfProducers,
	"reader select outbox":         "id event_type event_version idempotency_key ordering_key related_reference available_at created_at xid",
	"reader select outbox_archive": "id event_type event_version idempotency_key ordering_key related_reference available_at created_at archived_at deliveries",
	"relay update outbox_delivery": "claim next_attempt_at joined blocked_by lease_expires_at last_attempt_at delivered_at not_after claimed_by attempts rescues " +
		"last_http_status replay status last_reason last_error",
	"relay insert outbox_delivery": "event_id claim next_attempt_at joined blocked_by lease_expires_at last_attempt_at delivered_at not_after claimed_by attempts payload_bytes " +
		"rescues last_http_status destination status ordering_key last_reason last_error",
	"relay update outbox_range":  "relay_id fence ended_at",
	"relay update outbox_intake": "system_identifier timeline recorded_at",
	"relay insert outbox_audit":  "event_id matched done actor origin action state destination selection detail",
	"relay update outbox_audit":  "updated_at done state detail",
}

const columnsOfProducers = "event_type event_version payload idempotency_key ordering_key related_reference headers available_at"

// What each right lets a login do. %[1]s is the relation or the call of the function, %[2]s a
// column, one that the login may update if there is any.
var attempts = map[string][]string{
	"table": {
		`select: SELECT FROM %[1]s`,
		`whole-select: COPY (SELECT * FROM %[1]s) TO STDOUT`,
		`insert: INSERT INTO %[1]s DEFAULT VALUES`,
		`update: UPDATE %[1]s SET %[2]s = DEFAULT WHERE false`,
		`delete: DELETE FROM %[1]s WHERE false`,
		`update: SELECT FROM %[1]s FOR KEY SHARE`,
		`delete whole-update: LOCK TABLE %[1]s IN ACCESS EXCLUSIVE MODE NOWAIT`,
		`none: TRUNCATE %[1]s CASCADE`,
		`none: CREATE TRIGGER mine BEFORE INSERT ON %[1]s FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()`,
		`none: CREATE INDEX ON %[1]s (%[2]s)`,
		`none: CREATE RULE mine AS ON INSERT TO %[1]s DO INSTEAD NOTHING`,
		`none: CREATE POLICY mine ON %[1]s`,
		`none: ALTER TABLE %[1]s DISABLE TRIGGER ALL`,
		`none: ALTER TABLE %[1]s OWNER TO CURRENT_USER`,
		`none: DROP TABLE %[1]s CASCADE`,
	},
	"sequence": {
		`select: SELECT last_value FROM %[1]s`,
		`usage update: SELECT nextval('%[1]s')`,
		`update: SELECT setval('%[1]s', 1)`,
		`none: ALTER SEQUENCE %[1]s RESTART`,
	},
	"function": {
		`execute: SELECT %[1]s`,
		`none: ALTER FUNCTION %[2]s RESET ALL`,
		`none: DROP FUNCTION %[2]s CASCADE`,
	},
}

// Every login tries everything with every table, sequence and function, and may do what is
// promised, nothing else.
func TestSecurityRights(t *testing.T) {
	t.Parallel()
	db := newTarget(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at) VALUES ('t', '1', 'old', '2020-01-01')`)
	db.cover()
	db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = '2020-01-01', next_attempt_at = '2020-01-01'`)
	db.login("relay").runs(`SELECT outbox_archive_batch(0, 10, interval '1 day', false)`) // makes a partition

	objects := db.objects()
	for _, o := range objects {
		if _, listed := promised[o.name]; !listed {
			t.Errorf("%s %s has no line in promised: say who may do what with it", o.kind, o.name)
		}
	}
	for name := range promised {
		if !slices.ContainsFunc(objects, func(o object) bool { return o.name == name }) {
			t.Errorf("there is no %s", name)
		}
	}
	for login := range logins {
		s := db.login(login)
		for _, o := range objects {
			rights := rightsOf(login, o.name)
			testkit.Equal(t, login+"'s rights on "+o.name, db.granted(login, o), strings.Join(slices.Sorted(maps.Keys(rights)), " "))
			if o.kind == "table" {
				db.wantColumns(login, o.name, rights)
				o.detail = db.strings(`SELECT attname::text FROM pg_attribute WHERE attrelid = $2::regclass AND attnum > 0 AND attidentity = '' AND NOT attisdropped
					ORDER BY has_column_privilege('attack_' || $1, attrelid, attnum, 'UPDATE') DESC, attnum LIMIT 1`, login, o.name)[0]
			}
			rights["whole-select"] = rights["select"] && promisedColumns[login+" select "+o.name] == ""
			rights["whole-update"] = rights["update"] && promisedColumns[login+" update "+o.name] == ""
			for _, attempt := range attempts[o.kind] {
				needs, statement, _ := strings.Cut(attempt, ": ")
				statement = fmt.Sprintf(statement, o.use, o.detail)
				allowed := slices.ContainsFunc(strings.Fields(needs), func(right string) bool { return rights[right] })
				if got := s.tries(statement); (got != insufficientPrivilege) != allowed {
					t.Errorf("%s: %s: %q, want it allowed: %t", login, statement, got, allowed)
				}
			}
		}
	}
}

// wantColumns checks which columns a login's rights on a table cover.
func (db *database) wantColumns(login, table string, rights map[string]bool) {
	db.t.Helper()
	for _, right := range []string{"select", "insert", "update"} {
		if !rights[right] {
			continue
		}
		want := promisedColumns[login+" "+right+" "+table]
		if want == "" {
			want = strings.Join(db.strings(`SELECT attname::text FROM pg_attribute WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum`, table), " ")
		}
		got := db.strings(`SELECT attname::text FROM pg_attribute WHERE attrelid = $2::regclass AND attnum > 0 AND NOT attisdropped
			AND has_column_privilege('attack_' || $1, attrelid, attnum, $3) ORDER BY attnum`, login, table, right)
		testkit.Equal(db.t, "columns of "+table+" that "+login+" may "+right, strings.Join(got, " "), want)
	}
}

// rightsOf returns what promised says of a login.
func rightsOf(login, name string) map[string]bool {
	rights := map[string]bool{}
	for part := range strings.SplitSeq(promised[name], "; ") {
		owner, list, _ := strings.Cut(part, ": ")
		if owner != login && (owner != "producers" || login != "producer" && login != "neighbour") {
			continue
		}
		for right := range strings.FieldsSeq(strings.Replace(list, "all", "select insert update delete", 1)) {
			rights[right] = true
		}
	}
	return rights
}

// An object is a table, a sequence or a function of the schema.
type object struct {
	kind, name  string
	use, detail string // for attempts
}

func (db *database) objects() []object {
	db.t.Helper()
	rows, err := db.pool.Query(db.t.Context(), `
		SELECT CASE relkind WHEN 'S' THEN 'sequence' ELSE 'table' END, relname::text, relname::text, ''
		FROM pg_class c WHERE relnamespace = 'public'::regnamespace AND relkind NOT IN ('i', 'I', 't')
		UNION ALL
		SELECT 'function', oid::regprocedure::text,
		       proname || '(' || array_to_string(ARRAY (SELECT 'NULL::' || format_type(a, NULL) FROM unnest(proargtypes) a), ', ') || ')', oid::regprocedure::text
		FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY 1, 2`)
	pgtest.Must(db.t, err)
	objects, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (o object, err error) {
		return o, row.Scan(&o.kind, &o.name, &o.use, &o.detail)
	})
	pgtest.Must(db.t, err)
	return objects
}

// granted returns the rights that the catalogue gives a login, in the order of the alphabet.
func (db *database) granted(login string, o object) string {
	db.t.Helper()
	query := map[string]string{
		"table": `SELECT r FROM unnest('{delete,insert,references,select,trigger,truncate,update}'::text[]) r
			WHERE has_table_privilege('attack_' || $1, $2, r) OR r IN ('insert', 'references', 'select', 'update') AND has_any_column_privilege('attack_' || $1, $2, r) ORDER BY r`,
		"sequence": `SELECT r FROM unnest('{select,update,usage}'::text[]) r WHERE has_sequence_privilege('attack_' || $1, $2, r) ORDER BY r`,
		"function": `SELECT 'execute' WHERE has_function_privilege('attack_' || $1, $2, 'EXECUTE')`,
	}[o.kind]
	return strings.Join(db.strings(query, login, o.name), " ")
}

const insufficientPrivilege = "42501"

// as returns a transaction that has the rights of the role alone.
func (db *database) as(role string) pgx.Tx {
	db.t.Helper()
	tx := begin(db.t, db.pool, pgx.ReadCommitted)
	pgtest.Exec(db.t, tx, `SET LOCAL ROLE `+role)
	return tx
}

func TestEnqueueNeedsOnlyTheRoleOfProducers(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		db.applyRoles()
		tx := db.begin(nil)
		pgtest.Must(t, tx.Exec(`SET LOCAL ROLE outbox_producer`))
		result, err := tx.Enqueue(outbox.Producer{}, event("a"), event("b"), event("a"))
		pgtest.Must(t, err)
		testkit.Equal(t, "result", result, outbox.Result{Inserted: 2, Duplicates: []string{"a"}})
		pgtest.Must(t, tx.Commit())
		testkit.Equal(t, "events", db.keys(), []string{"a", "b"})

		tx = db.begin(nil)
		pgtest.Must(t, tx.Exec(`SET LOCAL ROLE outbox_producer`))
		result, err = tx.Enqueue(outbox.Producer{}, event("a"), event("c"))
		pgtest.Must(t, err)
		testkit.Equal(t, "result of a repeated event", result, outbox.Result{Inserted: 1, Duplicates: []string{"a"}})
		reused := event("b")
		reused.Payload = []byte(`2`)
		_, err = tx.Enqueue(outbox.Producer{}, reused)
		if !errors.Is(err, outbox.ErrKeyReused) || !strings.Contains(err.Error(), "Payload") {
			t.Errorf("a reused key: %v", err)
		}
		pgtest.Must(t, tx.Rollback())

		tx = db.begin(nil)
		pgtest.Must(t, tx.Exec(`SET LOCAL ROLE outbox_relay`))
		_, err = tx.Enqueue(outbox.Producer{}, event("c"))
		testkit.Equal(t, "error", err.Error(), `outbox: insert events: ERROR: permission denied for table outbox (SQLSTATE 42501); `+
			`grant outbox_producer to the role, see migrations/roles.sql`)
		pgtest.Must(t, tx.Rollback())
	})
}

// The default of xid runs with the producer's rights, and the function that it calls with those of
// the owner. Nothing that a producer makes may take the place of what they use.
func TestSecurityProducerCannotDivertTheDefault(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.applyRoles()
	db.exec(`CREATE SCHEMA evil; GRANT ALL ON SCHEMA evil TO outbox_producer;
		SELECT setval('outbox_armed', (extract(epoch FROM now()) * 1000)::bigint + 600000)`)
	listener, err := pgx.Connect(t.Context(), db.dsn)
	pgtest.Must(t, err)
	defer listener.Close(t.Context())
	pgtest.Exec(t, listener, `LISTEN outbox_wake`)
	tx := db.as("outbox_producer")
	pgtest.Exec(t, tx, `
		CREATE TEMP SEQUENCE outbox_armed;
		SET LOCAL search_path = evil, public;
		CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''2100-01-01''::timestamptz';
		CREATE FUNCTION pg_current_xact_id() RETURNS xid8 LANGUAGE sql AS 'SELECT ''7''::xid8';
		CREATE FUNCTION outbox_wake() RETURNS xid8 LANGUAGE sql AS 'SELECT ''7''::xid8';
		CREATE FUNCTION pg_sequence_last_value(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint';
		CREATE FUNCTION pg_notification_queue_usage() RETURNS float8 LANGUAGE sql AS 'SELECT 1::float8';
		CREATE FUNCTION pg_notify(text, name) RETURNS void LANGUAGE plpgsql AS 'BEGIN RAISE ''as %'', current_user; END';
		INSERT INTO public.outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k')`)
	var xid string
	pgtest.Must(t, tx.QueryRow(t.Context(), `SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text`).Scan(&xid))
	pgtest.Must(t, tx.Commit(t.Context()))
	testkit.Equal(t, "xid", db.strings(`SELECT xid::text FROM outbox`), []string{xid})
	notification, err := listener.WaitForNotification(t.Context())
	pgtest.Must(t, err)
	testkit.Equal(t, "payload", notification.Payload, "public")
}
