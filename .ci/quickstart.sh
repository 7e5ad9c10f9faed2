#!/bin/sh
# Runs the README's quick start on an empty database, and looks for its effect. Started by: make check-quickstart. Three things differ:
# the database, the port, which may be taken here, and the sleep, which waits for the shipment.
set -eu
cd "$(dirname "$0")/.."

export LISTEN="127.0.0.1:$((20000 + $$ % 10000))"
steps=$(mktemp)
trap 'rm -f "$steps"' EXIT
cat >"$steps" <<'START'
set -eEm
trap 'kill %1 %2 2>/dev/null' ERR
sleep() {
	for _ in {1..300}; do
		[ "$(psql "$DATABASE_URL" -Atc 'SELECT count(*) FROM shipments')" -eq 0 ] || return 0
		command sleep 0.1
	done
	return 1
}
START
awk '/^## Quick start/ {here = 1} here && /^```$/ {exit} code {print} here && /^```sh$/ {code = 1}' README.md |
	sed -e 's|postgres://postgres@localhost:5432/postgres|"$DATABASE_URL"|' -e "s|127.0.0.1:8080/|$LISTEN/|" >>"$steps"
echo 'kill %1 %2' >>"$steps" # which the README says below its block
if ! shown=$(bash "$steps" 2>&1); then
	echo "$shown"
	echo 'the quick start of the README failed' >&2
	exit 1
fi
echo "$shown"
for expected in '^ *4711 *| *99.90$' '^default  *delivered '; do
	echo "$shown" | grep -q -- "$expected" || { echo "the quick start shows no $expected" >&2; exit 1; }
done
