#!/bin/sh
# What an idle relay costs while its metrics are scraped every 15 seconds: time to its first claim, queries a second, memory. Run it as
# make footprint. It ends with an error when the relay asks more than 1.2 times a second or holds more than 25 MiB.
set -eu

relay=$PWD/bin/outbox-relay
window=${WINDOW:-60}
log=$PGHOST/log
export OUTBOX_DATABASE_URL="$DATABASE_URL" OUTBOX_DESTINATION_URL=http://127.0.0.1:1/ OUTBOX_RELAY_NAME=footprint OUTBOX_LOG_LEVEL=error
# The nightly deletion asks ten times: it must not fall into the window.
export OUTBOX_RETENTION_SCHEDULE="0 $((($(date -u +%-H) + 12) % 24)) * * *"
export OUTBOX_METRICS_LISTEN=127.0.0.1:$((20000 + $$ % 10000))

command -v curl >/dev/null || { echo 'install curl first' >&2; exit 1; }
scrape() { curl -sS --fail --max-time 5 "http://$OUTBOX_METRICS_LISTEN/metrics"; }
# until_is VALUE STATEMENT waits for the relay to bring it about.
until_is() {
	until [ "$(sql "$2")" = "$1" ]; do
		kill -0 "$pid" 2>/dev/null || { echo 'the relay has ended' >&2; exit 1; }
	done
}
sql() { psql -X -q -t -A -v ON_ERROR_STOP=1 -c "$1"; }

"$relay" migrate up >/dev/null
# A first relay brings in the routes, and the server's caches.
"$relay" run &
pid=$!
trap 'kill "$pid" 2>/dev/null || true' EXIT
until_is 1 'SELECT count(*) FROM outbox_relay'
kill "$pid"
wait "$pid"

# The number of a claim is its time, in microseconds.
sql "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'k')"
started=$(date +%s%N)
"$relay" run 2>/dev/null &
pid=$!
until_is 1 'SELECT count(*) FROM outbox_delivery WHERE claim > 0'
claimed=$(sql 'SELECT claim * 1000 FROM outbox_delivery')
# Nothing listens at the destination, so it is held: not so an idle one.
until_is 1 "SELECT count(*) FROM outbox_destination WHERE breaker = 'open'"
sql 'DELETE FROM outbox_delivery; DELETE FROM outbox_destination; DELETE FROM outbox; DELETE FROM outbox_alert'
sleep 5

# Every statement that reaches the server, by whatever connection of the relay.
sql "ALTER SYSTEM SET log_line_prefix = '%a|'"
sql "ALTER SYSTEM SET log_statement = 'all'"
sql 'SELECT pg_reload_conf()' >/dev/null
sleep 2
before=$(grep -cE '^outbox-relay[^|]*\|LOG: +(execute|statement)' "$log" || true)
end=$(($(date +%s) + window))
while [ "$(date +%s)" -lt "$end" ]; do
	scrape >/dev/null
	sleep 15
done
after=$(grep -cE '^outbox-relay[^|]*\|LOG: +(execute|statement)' "$log" || true)
memory=$(awk '/^VmRSS/ { print $2 }' "/proc/$pid/status")

awk -v first=$(((claimed - started) / 1000000)) -v queries=$((after - before)) -v window="$window" -v memory="$memory" 'BEGIN {
	printf "first claim after the start  %d ms\nqueries while idle           %.2f a second\nmemory while idle            %.1f MiB\n",
		first, queries / window, memory / 1024
	exit queries > 1.2 * window || memory > 25 * 1024
}' || { echo 'more than 1.2 queries a second, or than 25 MiB' >&2; exit 1; }
scrape | grep '^outbox_backlog_deliveries{destination="default"} 0$' >/dev/null || { echo 'the scrape shows no sample' >&2; exit 1; }
