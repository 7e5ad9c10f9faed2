# Applies, reverts and applies both sets of migrations with the stock goose CLI, and compares each step with what
# outbox-relay makes and sees. Run by `make check-migrations`: DATABASE_URL leads to an empty database, GOOSE names the CLI.
set -eu

relay=bin/outbox-relay
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
	echo "migrations: $*" >&2
	exit 1
}

# The schema as SQL, without goose's own table. pg_dump ends its output with a random word to guard against injection.
dump() {
	pg_dump --schema-only --no-owner --exclude-table="$table*" | grep -v -e '^\\restrict ' -e '^\\unrestrict '
}

# Whatever has a name in the schema and does not belong to goose's table: relations, functions, types.
leftovers() {
	psql -v ON_ERROR_STOP=1 -At <<-SQL
		SELECT 'relation ' || relname FROM pg_class
		WHERE relnamespace = current_schema()::regnamespace AND relname NOT LIKE '$table%'
		UNION ALL
		SELECT 'function ' || proname FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
		UNION ALL
		SELECT 'type ' || typname FROM pg_type
		WHERE typnamespace = current_schema()::regnamespace AND typname NOT LIKE '%$table%'
	SQL
}

# status CODE: outbox-relay migrate status must exit with it.
status() {
	code=0
	OUTBOX_DATABASE_URL=$DATABASE_URL "$relay" migrate status --set "$set" >"$work/status" 2>&1 || code=$?
	[ "$code" -eq "$1" ] || fail "outbox-relay migrate status --set $set exits $code, want $1: $(cat "$work/status")"
}

goose() {
	"$GOOSE" -dir "migrations/$set" -table "$table" postgres "$DATABASE_URL" "$@" >"$work/goose" 2>&1 ||
		fail "goose $*: $(cat "$work/goose")"
}

for set in outbox inbox; do
	table=${set}_schema_version

	status 5 # there is nothing yet
	goose up
	status 0
	dump >"$work/first"
	grep -q 'CREATE TABLE' "$work/first" || fail "goose up made no table of $set"

	goose down-to 0
	status 5
	left=$(leftovers)
	[ -z "$left" ] || fail "after goose down-to 0 of $set there is still: $left"

	goose up
	status 0
	dump >"$work/second"
	diff -u "$work/first" "$work/second" || fail "down and up again makes another $set schema"

	goose down-to 0
	psql -q -v ON_ERROR_STOP=1 -c "DROP TABLE $table"
	OUTBOX_DATABASE_URL=$DATABASE_URL "$relay" migrate up --set "$set" >/dev/null
	dump >"$work/relay"
	diff -u "$work/first" "$work/relay" || fail "outbox-relay migrate up makes another $set schema than goose"
	goose status
	! grep -q Pending "$work/goose" || fail "goose does not see what outbox-relay applied: $(cat "$work/goose")"

	OUTBOX_DATABASE_URL=$DATABASE_URL "$relay" migrate down --set "$set" --to 0 --yes >/dev/null
	left=$(leftovers)
	[ -z "$left" ] || fail "after outbox-relay migrate down of $set there is still: $left"
	psql -q -v ON_ERROR_STOP=1 -c "DROP TABLE $table"
	echo "ok	$set: up, down, up, by goose and by outbox-relay: the same schema, and nothing left behind"
done
