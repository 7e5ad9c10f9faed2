# Tries the command line as a user would, above all where it must refuse. Run by `make smoke`: DATABASE_URL leads to an
# empty database.
set -eu

relay=$PWD/bin/outbox-relay roles=$PWD/migrations/roles.sql
work=$(mktemp -d)
pid=
trap '[ -z "$pid" ] || kill -9 "$pid" 2>/dev/null; rm -rf "$work"' EXIT
cd "$work" # where no outbox-relay.yaml lies
failures=0

# Nothing of the caller's own configuration counts.
for name in $(env | sed -n 's/^\(OUTBOX_[A-Z_]*\)=.*/\1/p'); do
	unset "$name"
done

# expect CODE TEXT COMMAND...: the command must exit with CODE and print TEXT, on stdout or stderr.
expect() {
	want=$1 text=$2 code=0
	shift 2
	"$@" >out 2>&1 </dev/null || code=$?
	if [ "$code" -ne "$want" ]; then
		echo "FAIL	$* exits $code, want $want:"
		cat out
		failures=$((failures + 1))
	elif [ -n "$text" ] && ! grep -qF -e "$text" out; then
		echo "FAIL	$* does not print \"$text\":"
		cat out
		failures=$((failures + 1))
	else
		echo "ok	exit $code	$(echo "$*" | sed "s|^env \(OUTBOX_[A-Z_]*=[^ ]* \)*||; s|$relay|outbox-relay|; s|^wait .*|outbox-relay, told to end|")"
	fi
}

# until_ok COMMAND...: tries for 10 seconds.
until_ok() {
	tries=0
	until "$@" >/dev/null 2>&1; do
		tries=$((tries + 1))
		[ "$tries" -lt 100 ] || return 1
		sleep 0.1
	done
}

away="OUTBOX_DATABASE_URL=postgres://nobody@127.0.0.1:1/none?connect_timeout=2"
here="OUTBOX_DATABASE_URL=$DATABASE_URL"
to="OUTBOX_DESTINATION_URL=http://127.0.0.1:9/webhooks"

# Asking for help.
expect 0 'outbox-relay migrate up' "$relay" --help
for command in run migrate 'migrate up' 'migrate down' 'migrate roles' 'migrate status' status 'events list' 'events show' replay discard pause resume relays audit 'routes list' 'routes test' 'config check' 'config show' bench drill version \
	'inbox status' 'inbox list' 'inbox show' 'inbox replay' 'inbox ignore' 'inbox prune' reconcile; do
	expect 0 'Usage: outbox-relay' "$relay" $command --help # its words are arguments
done
expect 0 'Usage: outbox-relay inbox' "$relay" help inbox
expect 0 'outbox-relay' "$relay" version
expect 0 '"version"' "$relay" version --json

# 2: usage.
expect 2 'no command given' "$relay"
expect 2 'unexpected argument' "$relay" deliver
expect 2 'unknown flag' "$relay" run --no-such-flag
expect 2 'out of range' env "$here" "$relay" events list --limit 0
expect 5 'migrate up' env "$here" "$relay" events show invoice-1
expect 2 'must be one of' env "$here" "$relay" migrate up --set mailbox
expect 2 'nothing says which deliveries' env "$here" "$relay" replay
expect 2 'nothing says which deliveries' env "$here" "$relay" discard --yes
expect 5 'migrate up' env "$here" "$relay" replay 1..
expect 2 'is not the id of an event' env "$here" sh -c 'echo 1.. | "$1" replay - --yes' sh "$relay"
expect 2 'has no zone' env "$here" "$relay" replay --since 2026-01-02T15:04:05
expect 2 'nothing says which events' env "$here" "$relay" inbox replay --receiver shipping --yes
expect 2 'must be one of' env "$here" "$relay" inbox ignore --status succeeded
expect 2 'out of range' env "$here" "$relay" bench --events 0
expect 2 'out of range' "$relay" drill http://127.0.0.1:9/ --rate 0
expect 2 'name the secrets' "$relay" drill http://127.0.0.1:9/
expect 2 'is less than 24h' env "$here" "$relay" inbox prune --older-than 1h
expect 2 'needs --destination' env "$here" "$relay" discard --head-of-key a
expect 2 'run the command on a terminal' env "$here" sh -c '"$1" migrate up >/dev/null && "$1" migrate down' sh "$relay"
expect 0 'version 0' env "$here" "$relay" migrate down --to 0 --yes

# 3: configuration, each mistake with its place and what to write instead.
expect 3 'OUTBOX_DATABASE_URL' env "$to" "$relay" run
expect 3 'destination' env "$here" "$relay" config check
expect 3 'OUTBOX_DATABASE_URL' "$relay" migrate up
expect 3 'flag --lease' env "$here" "$to" "$relay" config check --lease=sixty
expect 3 'whsec_' env "$here" "$to" OUTBOX_SIGNING_SECRET=hunter2 "$relay" config check
expect 3 'cannot read' env "$here" "$to" "$relay" run --config absent.yaml
printf 'relay:\n\tlease: 60s\n' >tab.yaml
expect 3 'tab.yaml:2' env "$here" "$to" "$relay" config check --config tab.yaml
printf 'relay: {leese: 60s}\n' >typo.yaml
expect 3 'lease' env "$here" "$to" "$relay" config check --config typo.yaml
expect 0 'valid' env "$here" "$to" "$relay" config check
printf 'database: {url: "${OUTBOX_DATABASE_URL}"}\ndestinations: {moved: {url: "http://127.0.0.1:9/"}}\n' >moved.yaml
secret='whsec_c21va2Utc21va2Utc21va2Utc21va2UtMQ=='
expect 0 'url:' env OUTBOX_DATABASE_URL=postgres://relay:hunter2@localhost/finance "$to" "OUTBOX_SIGNING_SECRET=$secret" "$relay" config show
if grep -q -e hunter2 -e "${secret#whsec_}" out; then
	echo 'FAIL	config show prints a secret'
	failures=$((failures + 1))
fi

# 4: the database cannot be reached.
for command in 'migrate up' 'migrate status' status 'status --healthcheck' 'inbox status' 'inbox list' bench; do
	expect 4 'cannot be reached' env "$away" "$relay" $command # its words are arguments
done

# 5: another schema than this build works with.
expect 5 'outbox-relay migrate up' env "$here" "$relay" migrate status
expect 5 'migrate up' env "$here" "$relay" status
expect 5 'migrate up' env "$here" "$relay" events list
expect 5 'migrate up' env "$here" "$relay" replay 1 --yes
expect 5 'migrate up' env "$here" "$to" "$relay" run
expect 0 'up to date' env "$here" "$relay" migrate up
expect 0 'up to date' env "$here" "$relay" migrate up
expect 0 'APPLIED' env "$here" "$relay" migrate status
expect 0 '"latest"' env "$here" "$relay" migrate status --json
expect 5 'migrate up --set inbox' env "$here" "$relay" inbox status
expect 0 'up to date' env "$here" "$relay" migrate up --set inbox
expect 0 'No relay is running' env "$here" "$relay" status
expect 0 '"destinations"' env "$here" "$relay" status --json
expect 1 'no relay named' env "$here" "$relay" status --healthcheck --name smoke

# 130: interrupted, here while it waits for a lock.
psql -q -c 'BEGIN; LOCK TABLE outbox_delivery; SELECT pg_sleep(60)' >/dev/null 2>&1 &
locker=$!
until_ok sh -c 'psql -Atc "SELECT mode FROM pg_locks WHERE relation = '"'outbox_delivery'"'::regclass" | grep -q AccessExclusiveLock'
env "$here" "$relay" status >/dev/null 2>&1 &
pid=$!
until_ok sh -c 'psql -Atc "SELECT pid FROM pg_locks WHERE NOT granted" | grep -q .'
kill -INT "$pid"
expect 130 '' wait "$pid"
pid=
psql -q -c "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(60)%' AND pid <> pg_backend_pid()" >/dev/null
wait "$locker" || true

# A relay lives, says so, tries what has no receiver, and ends with 0 when it is told to.
expect 0 'No delivery matches' env "$here" "$relay" events list
expect 1 'no event has the id' env "$here" "$relay" events show 1
psql -q -c "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('smoke.tested', '{}', 'smoke-1')"
env "$here" "$to" "$relay" run --name smoke 2>log &
pid=$!
until_ok env "$here" "$relay" status --healthcheck --name smoke || { cat log; failures=$((failures + 1)); }
expect 0 'ok: relay' env "$here" "$relay" status --healthcheck --name smoke
expect 0 'smoke' env "$here" "$relay" status
# No process listens there, so the delivery is held: the log has the attempt, which is not counted.
until_ok sh -c 'psql -Atc "SELECT count(*) FROM outbox_attempt" | grep -q "[1-9]"' || { cat log; failures=$((failures + 1)); }
expect 0 'smoke-1' env "$here" "$relay" events list --status pending
expect 0 'refused' env "$here" "$relay" events show 1
expect 0 'Why it waits' env "$here" "$relay" events show 1
expect 0 'smoke' env "$here" "$relay" relays
expect 0 'default' env "$here" "$relay" routes list
expect 0 'goes to default' env "$here" "$relay" routes test invoice.paid
expect 1 'did you mean "default"' env "$here" "$relay" pause defualt
expect 0 'is paused' env "$here" "$relay" pause default --reason smoke
expect 0 'was paused already' env "$here" "$relay" pause default
expect 0 'resume default' env "$here" "$relay" status
expect 0 'is resumed' env "$here" "$relay" resume default
kill -TERM "$pid"
expect 0 '' wait "$pid"
pid=

# Another configuration: what waits for a destination that no relay has is unserved.
env "$here" "OUTBOX_CONFIG=moved.yaml" "$relay" run --name moved 2>log &
pid=$!
until_ok env "$here" "$relay" status --healthcheck --name moved || { cat log; failures=$((failures + 1)); }
expect 0 'outbox-relay discard --destination default' env "$here" "$relay" status
expect 0 'unserved: no running relay' env "$here" "$relay" events show 1
kill -TERM "$pid"
expect 0 '' wait "$pid"
pid=
expect 3 'beside the destinations of moved.yaml' env "$here" "$to" "OUTBOX_CONFIG=moved.yaml" "$relay" config check

# A measurement leaves nothing behind.
expect 0 'limit: ' env "$here" "$relay" bench --events 200 --rate 20 --duration 1s
expect 0 '"events_per_second"' env "$here" "$relay" bench --events 200 --rate 0 --json
expect 0 '' test -z "$(psql -X -t -A -c "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'outbox\_bench\_%'")"

# Giving up and sending again, with nobody at a terminal.
expect 0 'dry run' env "$here" "$relay" discard --destination default --dry-run
expect 2 'run the command on a terminal' env "$here" "$relay" discard 1
expect 1 'no event' env "$here" "$relay" replay 1..
expect 0 'Discarded 1 delivery' env "$here" "$relay" discard 1 --yes
expect 0 'nothing to retry' env "$here" "$relay" retry 1 --yes
expect 0 'nothing to replay' env "$here" "$relay" replay 1 --yes
expect 0 'Replayed 1 delivery' env "$here" "$relay" replay 1 --status discarded --yes
expect 0 '1 pending' env "$here" "$relay" replay 1 --yes
expect 0 '"unknown_events": 1' env "$here" "$relay" replay 77 --yes --json
psql -q -c 'DELETE FROM outbox_route'
expect 6 'would be parked' env "$here" "$relay" routes test invoice.paid

# A receiver's operator has the URL of its database, and a login with the role of support or none.
expect 0 'No event was received' env "$here" "$relay" inbox status
expect 0 'No event matches' env "$here" "$relay" inbox list
expect 1 'no event with key' env "$here" "$relay" inbox show --key smoke-1
psql -q -c "INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, attempts, payload)
	SELECT 'shipping', 'finance', 'smoke-' || i, 'smoke.tested', 'failed', 8, '{}' FROM generate_series(1, 3) i"
expect 0 '3 events of "shipping" failed' env "$here" "$relay" inbox status
expect 0 'repeat the command with --before' env "$here" "$relay" inbox list --limit 1
expect 0 'never reads them' env "$here" "$relay" inbox show --key smoke-1
expect 2 'run the command on a terminal' env "$here" "$relay" inbox replay --status failed
expect 0 'dry run' env "$here" "$relay" inbox replay --status failed --dry-run
expect 0 'nothing to replay' env "$here" "$relay" inbox replay --type none --yes
expect 0 'Replayed 1 event.' env "$here" "$relay" inbox replay --key smoke-1 --yes
expect 0 'Ignored 3 events.' env "$here" "$relay" inbox ignore --type 'smoke.*' --yes
expect 0 '"unknown_ids": 1' env "$here" "$relay" inbox replay 77 --yes --json
expect 0 'Would forget 0 events' env "$here" "$relay" inbox prune --older-than 2160h --dry-run
expect 2 'nothing says who is asked' env "$here" "$relay" reconcile --destination smoke
expect 3 'RECEIVER_DATABASE_URL is not set' env "$here" "$relay" reconcile --destination smoke --receiver smoke
psql -q -c 'CREATE ROLE smoke_support LOGIN'
support="OUTBOX_DATABASE_URL=$(echo "$DATABASE_URL" | sed 's|//[^/@]*@|//|; s|//|//smoke_support@|')"
expect 1 'GRANT inbox_support TO smoke_support' env "$support" "$relay" inbox status
psql -q -c 'REVOKE CREATE ON SCHEMA public FROM PUBLIC' -f "$roles" -c 'GRANT inbox_support TO smoke_support' >/dev/null
expect 0 'shipping' env "$support" "$relay" inbox status
expect 0 'Replayed 3 events.' env "$support" "$relay" inbox replay --status ignored --yes
expect 1 'GRANT inbox_receiver TO smoke_support' env "$support" "$relay" inbox prune --older-than 2160h --yes

[ "$failures" -eq 0 ] || {
	echo "smoke: $failures expectations were not met" >&2
	exit 1
}
