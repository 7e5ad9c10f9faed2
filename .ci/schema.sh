# Prints the schema that the migrations of both sets make, without what pg_dump says about itself. With the argument check it compares that
# with docs/schema.sql. Run by `make schema` and `make check-migrations`: DATABASE_URL leads to an empty database.
set -eu

for set in outbox inbox; do
	OUTBOX_DATABASE_URL=$DATABASE_URL bin/outbox-relay migrate up --set "$set" >/dev/null
done

version=$(($(psql -At -c 'SHOW server_version_num') / 10000))
head="-- Written by make schema, from the migrations of both sets, by PostgreSQL $version. To make it: outbox-relay migrate up."

schema() {
	echo "$head"
	pg_dump --schema-only --no-owner --exclude-table='*_schema_version*' | sed -e '/^--$/d' -e '/^-- \(Name: \|Dumped \|PostgreSQL database dump\)/d' \
		-e '/^SET /d' -e '/^SELECT pg_catalog\.set_config/d' -e '/^\\\(un\)\{0,1\}restrict /d' -e 's/\bpublic\.//g' | cat -s
}

if [ "${1-}" != check ]; then
	schema
elif ! grep -qF -e "$head" docs/schema.sql; then
	echo "not compared: docs/schema.sql is of another version of PostgreSQL than $version"
else
	schema | diff -u docs/schema.sql - || {
		echo 'schema: docs/schema.sql is not what the migrations make; run make schema' >&2
		exit 1
	}
	echo 'ok	docs/schema.sql is what the migrations make'
fi
