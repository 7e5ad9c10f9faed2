#!/bin/sh
# Runs the README's quick start, and the receiver of docs/receiving.md, each on an empty database, and looks for the effect. Started
# by: make check-quickstart. Three things differ: the database, the port, which may be taken here, and the sleep, which waits.
set -eu
cd "$(dirname "$0")/.."

export LISTEN="127.0.0.1:$((20000 + $$ % 10000))"
steps=$(mktemp)
trap 'rm -f "$steps"' EXIT

# try runs the first commands below the given heading of a file, and looks for lines in what they show.
try() {
	file=$1 heading=$2 database=$3
	shift 3
	createdb "$database"
	cat >"$steps" <<'START'
set -eEm
trap 'kill %1 %2 2>/dev/null' ERR
sleep() {
	for _ in {1..300}; do
		[ "$(psql "$OUTBOX_DATABASE_URL" -Atc "SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'")" -eq 0 ] || return 0
		command sleep 0.1
	done
	return 1
}
START
	awk -v heading="## $heading" '$0 == heading {here = 1} here && /^```$/ {exit} code {print} here && /^```sh$/ {code = 1}' "$file" |
		sed -e "s|postgres://postgres@localhost:5432/postgres|'$(echo "$DATABASE_URL" | sed "s|/postgres?|/$database?|; s|&|\\\\&|g")'|" \
			-e "s|127.0.0.1:8080/|$LISTEN/|" -e "s|outbox-relay listen |&--listen $LISTEN |" >>"$steps"
	echo 'kill %1 %2' >>"$steps" # which the text says below its block
	if ! shown=$(bash "$steps" 2>&1); then
		echo "$shown"
		echo "the commands of $file, $heading, failed" >&2
		exit 1
	fi
	echo "$shown"
	for expected; do
		echo "$shown" | grep -q -- "$expected" || { echo "$file, $heading: shows no $expected" >&2; exit 1; }
	done
}

try README.md 'Quick start' quickstart '^parcel-77-dispatched\|parcel.dispatched' 'delivered'
try docs/receiving.md 'See it work' receiver '^ *4711 *| *99.90$' '^default  *delivered '
