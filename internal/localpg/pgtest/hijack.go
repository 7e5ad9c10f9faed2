package pgtest

import (
	"context"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// hijackSQL makes decoys in schema public of whatever statements may mean by an unqualified name.
// $1 are the words of the statements, $2 those before a parenthesis, $3 their operators.
//
//   - each operator with each pair of types, and with each type alone,
//   - each function of pg_catalog, and of ours, without arguments, with each type, with each type
//     beside each usual one; with more arguments, with each pair of usual types in any two places
//     of its own types.
//
// Types are all of the relations that the statements name, of results of the functions, and of the
// statements themselves. A decoy that runs counts, also where its transaction is rolled back. A
// login that is no superuser's fails already where a statement has one in a branch that is not
// taken.
//
// The rows are written into the system tables, whose columns differ by version: CREATE FUNCTION
// would take minutes for as many.
const hijackSQL = `
SET search_path = pg_catalog; -- or they would divert this script
CREATE SEQUENCE public.hijacked;
GRANT ALL ON SEQUENCE public.hijacked TO PUBLIC;
CREATE FUNCTION public.hijacker() RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_catalog.nextval('public.hijacked');
    RAISE EXCEPTION 'hijacked: %', pg_catalog.current_query();
END
$$;
REVOKE ALL ON FUNCTION public.hijacker() FROM PUBLIC;

CREATE TEMPORARY TABLE hijack_types AS
SELECT DISTINCT t.oid, (t.typname IN ('text', 'name', 'int8', 'int4', 'bool', 'timestamptz', 'interval', 'oid')) AS usual
FROM pg_type t
WHERE t.typtype IN ('b', 'e') AND t.typnamespace = 'pg_catalog'::regnamespace AND t.typname NOT IN ('pg_node_tree', 'pg_ndistinct', 'pg_dependencies', 'pg_mcv_list') AND (
    t.typname IN ('text', 'varchar', 'bpchar', 'name', 'char', 'int8', 'int4', 'int2', 'numeric', 'float8', 'float4', 'bool', 'timestamptz', 'timestamp', 'date',
        'interval', 'oid', 'regclass', 'tid', 'json', 'jsonb', 'bytea', '_text', '_int8', '_int4', '_name', '_oid', '_tid')
    OR t.typname = ANY ($casts)
    OR t.oid IN (SELECT a.atttypid FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
                 WHERE a.attnum > 0 AND c.relname = ANY ($words) AND c.relnamespace IN ('public'::regnamespace, 'pg_catalog'::regnamespace))
    OR t.oid IN (SELECT p.prorettype FROM pg_proc p WHERE p.proname = ANY ($calls)));

-- Each function of pg_catalog with each number of arguments that it can be called with, and ours. Places of polymorphic types have text.
CREATE TEMPORARY TABLE hijack_calls AS
SELECT p.proname, n AS arguments, min(p.prorettype) FILTER (WHERE r.typtype IN ('b', 'e')) AS result, min(p.proargnames[n]) AS last_name,
       (SELECT array_agg(CASE WHEN t.typtype = 'p' THEN 25 ELSE coalesce(t.oid, 25) END ORDER BY i)
        FROM generate_series(1, n) i LEFT JOIN pg_type t ON t.oid = p.proargtypes[i - 1]) AS types
FROM pg_proc p JOIN pg_type r ON r.oid = p.prorettype,
     generate_series(p.pronargs - p.pronargdefaults - (p.provariadic <> 0)::integer, greatest(p.pronargs, 4 * (p.provariadic <> 0)::integer)) n
WHERE p.prokind <> 'p' AND n <= 8 AND p.proname = ANY ($calls) AND (p.pronamespace = 'pg_catalog'::regnamespace AND NOT EXISTS (
          SELECT FROM pg_type t WHERE t.typname = p.proname AND t.typnamespace = 'pg_catalog'::regnamespace)
      OR p.pronamespace = 'public'::regnamespace AND p.proname ~ '^(outbox|inbox|processed)_')
GROUP BY p.proname, n, types;

CREATE TEMPORARY TABLE hijackers AS
SELECT DISTINCT ON (proname, arguments) f.*, 4000000000 + row_number() OVER () AS oid FROM (
    SELECT c.proname, c.result, c.last_name, ARRAY[]::oid[] AS arguments FROM hijack_calls c WHERE c.arguments = 0
    UNION ALL
    SELECT c.proname, c.result, c.last_name, ARRAY[l.oid] FROM hijack_calls c, hijack_types l WHERE c.arguments = 1
    UNION ALL
    SELECT c.proname, c.result, NULL, ARRAY[l.oid, r.oid] FROM hijack_calls c, hijack_types l, hijack_types r WHERE c.arguments = 2 AND (l.usual OR r.usual)
    UNION ALL
    SELECT c.proname, c.result, NULL, (SELECT array_agg(CASE i WHEN a THEN l.oid WHEN b THEN r.oid ELSE c.types[i] END ORDER BY i) FROM generate_series(1, c.arguments) i)
    FROM hijack_calls c, generate_series(1, c.arguments) a, generate_series(1, c.arguments) b, hijack_types l, hijack_types r
    WHERE c.arguments > 2 AND a < b AND l.usual AND r.usual
) f WHERE (proname, array_to_string(arguments, ' ')) NOT IN (SELECT proname, proargtypes::text FROM pg_proc WHERE pronamespace = 'public'::regnamespace);

CREATE TEMPORARY TABLE hijack_operators AS
SELECT DISTINCT o.oprname, o.oprkind, l.oid AS l, r.oid AS r, o.result FROM (
    SELECT o.oprname, o.oprkind, min(o.oprresult) FILTER (WHERE t.typtype = 'b') AS result FROM pg_operator o JOIN pg_type t ON t.oid = o.oprresult
    WHERE o.oprname = ANY ($operators || ARRAY['=', '<>', '<', '<=', '>', '>=', '~~'] /* of IN, BETWEEN, LIKE */) GROUP BY o.oprname, o.oprkind
) o JOIN hijack_types r ON true JOIN (SELECT oid FROM hijack_types UNION ALL SELECT 0) l ON (l.oid = 0) = (o.oprkind = 'l');

-- One function does for all operators of the same types.
INSERT INTO hijackers (proname, result, arguments, oid)
SELECT 'hijacker_' || coalesce(result, 25), coalesce(result, 25), array_remove(ARRAY[l, r], 0::oid), 4100000000 + row_number() OVER ()
FROM (SELECT DISTINCT l, r, result FROM hijack_operators) o;

DO $do$ BEGIN
    EXECUTE (SELECT 'INSERT INTO pg_proc SELECT ' || string_agg(CASE attname
            WHEN 'oid' THEN 'h.oid::oid' WHEN 'proname' THEN 'h.proname' WHEN 'pronargs' THEN 'cardinality(h.arguments)' WHEN 'prorettype' THEN 'coalesce(h.result, 25)'
            WHEN 'proargtypes' THEN 'array_to_string(h.arguments, '' '')::oidvector' WHEN 'proargnames' THEN 'CASE WHEN h.last_name <> '''' THEN ARRAY[h.last_name] END'
            ELSE 'p.' || attname END, ', ' ORDER BY attnum) || ' FROM hijackers h, pg_proc p WHERE p.oid = ''public.hijacker''::regproc'
        FROM pg_attribute WHERE attrelid = 'pg_proc'::regclass AND attnum > 0);
END $do$;

CREATE OPERATOR public.=== (FUNCTION = texteq, LEFTARG = text, RIGHTARG = text);
DO $do$ BEGIN
    EXECUTE (SELECT 'INSERT INTO pg_operator SELECT ' || string_agg(CASE attname
            WHEN 'oid' THEN '(4200000000 + row_number() OVER ())::oid' WHEN 'oprname' THEN 'o.oprname' WHEN 'oprkind' THEN 'o.oprkind' WHEN 'oprleft' THEN 'o.l'
            WHEN 'oprright' THEN 'o.r' WHEN 'oprresult' THEN 'coalesce(o.result, 25)' WHEN 'oprcode' THEN 'h.oid::oid::regproc'
            ELSE 'p.' || attname END, ', ' ORDER BY attnum) || ' FROM pg_operator p, hijack_operators o
            JOIN hijackers h ON h.proname = ''hijacker_'' || coalesce(o.result, 25) AND h.arguments = array_remove(ARRAY[o.l, o.r], 0::oid)
            WHERE p.oid = ''public.===(text, text)''::regoperator'
        FROM pg_attribute WHERE attrelid = 'pg_operator'::regclass AND attnum > 0);
END $do$;
DROP TABLE hijack_types, hijack_calls, hijackers, hijack_operators;
RESET search_path`

// Decoys are what a login that may create objects in schema public has made there.
type Decoys struct {
	conn *pgx.Conn
}

// Hijack makes decoys of all that the statements in the Go and SQL files below the sources may mean
// by a name.
func Hijack(t testing.TB, dsn string, sources ...string) *Decoys {
	t.Helper()
	var text strings.Builder
	for _, source := range sources {
		files := os.DirFS(source)
		Must(t, fs.WalkDir(files, ".", func(file string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(file, ".sql") && (!strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go")) {
				return err
			}
			content, err := fs.ReadFile(files, file)
			text.Write(content)
			return err
		}))
	}
	list := func(pattern string) string {
		var words []string
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text.String(), -1) {
			words = append(words, match[1])
		}
		slices.Sort(words)
		return "ARRAY['" + strings.Join(slices.Compact(words), "','") + "']::text[]"
	}
	conn, err := pgx.Connect(t.Context(), dsn)
	Must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	Exec(t, conn, strings.NewReplacer("$words", list(`([a-z_][a-z0-9_]+)`), "$casts", list(`::([a-z_0-9]+)`),
		"$calls", list(`([a-z_][a-z0-9_]*)\s*\(`), "$operators", list(`([-+*/<>=~!@#%^&|]+)`)).Replace(hijackSQL))
	return &Decoys{conn}
}

// WantUnused ends the test if a decoy was called, or is part of anything that was created since.
func (d *Decoys) WantUnused(t testing.TB, after string) {
	t.Helper()
	calls := Row[int64](t, d.conn, `SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM public.hijacked`)
	if used := d.used(t, d.conn, "objid"); calls != 0 || len(used) != 0 {
		t.Fatalf("after %s: %d calls of decoys; made of decoys: %q", after, calls, used)
	}
}

// used describes one side of the dependencies on decoys.
func (d *Decoys) used(t testing.TB, db interface {
	QueryRow(ctx context.Context, query string, args ...any) pgx.Row
}, side string,
) []string {
	t.Helper()
	classid := strings.Replace(side, "objid", "classid", 1)
	return Row[[]string](t, db, `SELECT ARRAY(SELECT pg_catalog.pg_describe_object(`+classid+`, `+side+`, 0) FROM pg_catalog.pg_depend
		WHERE refobjid OPERATOR(pg_catalog.>=) 4000000000::pg_catalog.oid)`)
}

// WantUnusedIn parses statements that are complete, as a function in another database without
// decoys can tell, and fails the test if one means a decoy anywhere, also in a branch that nothing
// takes. It returns the names of those it has parsed.
func (d *Decoys) WantUnusedIn(t testing.TB, plain *pgx.Conn, statements map[string]string) (parsed []string) {
	t.Helper()
	for name, statement := range statements {
		if _, err := plain.Prepare(t.Context(), name, statement); err != nil {
			continue // a part of one
		}
		types := Row[string](t, plain, `SELECT array_to_string(parameter_types, ', ') FROM pg_prepared_statements WHERE name = $1`, name)
		parsed = append(parsed, name)
		tx, err := d.conn.Begin(t.Context())
		Must(t, err)
		if _, err := tx.Exec(t.Context(), `CREATE FUNCTION pg_temp.statement(`+types+`) RETURNS void LANGUAGE sql BEGIN ATOMIC `+statement+`; END`); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if used := d.used(t, tx, "refobjid"); len(used) > 0 {
			t.Errorf("%s means %q", name, used)
		}
		Must(t, tx.Rollback(t.Context()))
	}
	return parsed
}
