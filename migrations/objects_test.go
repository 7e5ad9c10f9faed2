package migrations_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// What is read from the files is what they leave in a database: all of it, and nothing else.
func TestObjectsAreThoseOfTheDatabase(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.New(t, migrations.Outbox))
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	rows, err := conn.Query(t.Context(), `
			SELECT CASE relkind WHEN 'i' THEN 'index' WHEN 'I' THEN 'index' WHEN 'S' THEN 'sequence' ELSE 'table' END || ' ' || relname FROM pg_class c
			WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'i', 'I', 'S') AND NOT relispartition AND relname NOT LIKE '%schema_version%'
			  AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = c.oid) AND NOT (relkind = 'S' AND EXISTS (SELECT FROM pg_depend WHERE objid = c.oid AND deptype = 'i'))
			UNION ALL SELECT 'constraint ' || conname FROM pg_constraint
			WHERE connamespace = 'public'::regnamespace AND contype NOT IN ('f', 'n', 't') AND conname NOT LIKE '%schema_version%'
			UNION ALL SELECT 'domain ' || typname FROM pg_type WHERE typnamespace = 'public'::regnamespace AND typtype = 'd'
			UNION ALL SELECT 'trigger ' || tgname FROM pg_trigger WHERE NOT tgisinternal
			UNION ALL SELECT 'function ' || proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace`)
	pgtest.Must(t, err)
	there, err := pgx.CollectRows(rows, pgx.RowTo[string])
	pgtest.Must(t, err)
	var read []string
	for _, o := range migrations.Objects() {
		read = append(read, o.Kind+" "+o.Name)
	}
	slices.Sort(there)
	slices.Sort(read)
	for _, name := range there {
		if !slices.Contains(read, name) {
			t.Errorf("the files do not say %s", name)
		}
	}
	for _, name := range read {
		if !slices.Contains(there, name) {
			t.Errorf("the database lacks %s", name)
		}
	}
	fill := strings.NewReplacer("{schema}", "public", "{name}", "'public'")
	for _, o := range migrations.Objects() {
		if o.Body == "" {
			continue
		}
		var body string
		if err := conn.QueryRow(t.Context(), `SELECT prosrc FROM pg_proc WHERE proname = $1`, o.Name).Scan(&body); err != nil || body != fill.Replace(o.Body) {
			t.Errorf("%s of %s: %v; the database has\n%s\nthe files say\n%s", o.Name, o.File, err, body, o.Body)
		}
	}
}

func TestGrantsAreThoseOfTheScript(t *testing.T) {
	t.Parallel()
	all := migrations.Grants()
	for _, want := range []migrations.Grant{
		{"outbox_producer", "INSERT", "table", "outbox", "event_type,event_version,payload,idempotency_key,ordering_key,related_reference,headers,available_at"},
		{"outbox_reader", "EXECUTE", "function", "outbox_is_routed(bigint)", ""},
		{"outbox_relay", "UPDATE", "table", "outbox_audit", "updated_at,done,state,detail"},
		{"outbox_relay", "UPDATE", "sequence", "outbox_armed", ""},
		{"outbox_relay", "EXECUTE", "function", "outbox_release_parked(bigint, bigint)", ""},
		{"outbox_producer", "EXECUTE", "function", "outbox_compare_events(text[], integer[], json[], text[], text[], text[], jsonb[])", ""},
		{"inbox_support", "SELECT", "table", "inbox_schema_version", ""},
		{"inbox_support", "SELECT", "table", "processed_events", "receiver,source,idempotency_key,event_type,event_version,related_reference,processing_state,received_at,processed_at,last_error,event_id,not_after,response_status,destination,ctid"},
	} {
		if !slices.Contains(all, want) {
			t.Errorf("%+v is missing in %+v", want, all)
		}
	}
}
