# Runs a `go test -cover`, passes its output on, and keeps its exit status. When the tests pass, it also holds that tests live in the
# room they test: each package with statements reaches 70 % from its own tests.
set -eu

# Packages that are no rooms, and why.
other='
cmd/                       programs: their commands and demonstrations are tested as a whole
consumer/natsconsumer      reads streams; the module internal/natstest tries it with real servers
consumer/storetest         a suite for authors of stores; the modules redisstore and dynamostore run it
internal/cli/              commands: the tests of cmd/outbox-relay run them as the program that users run
internal/localcert         makes certificates for tests
internal/localkafka        starts servers for tests
internal/localnats         starts servers for tests
internal/localpg           starts PostgreSQL for tests, and has its own tests
internal/notify/notifytest has servers for tests of alerts
internal/process           runs the processes of demonstrations
internal/readertest        has a suite for readers of logs; kafkaconsumer and the module internal/natstest run it
internal/receivertest      gives tests of receivers what they need
internal/relaytest         gives tests of relays what they need
internal/testkit           has what tests of every module share
internal/testsize          keeps make test short
'

# Rooms among them, which have no process to run.
rooms='
internal/cli/config
internal/cli/output
'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
	code=0
	"$@" || code=$?
	echo "$code" >"$work/code"
} | tee "$work/output"
code=$(cat "$work/code")
[ "$code" -eq 0 ] || exit "$code"

OTHER=$other ROOMS=$rooms awk '
function list(text, into,    lines, n, i, name) {
	n = split(text, lines, "\n")
	for (i = 1; i <= n; i++) {
		name = lines[i]
		sub(/[ \t].*/, "", name)
		if (name != "") into[name] = 1
	}
}
function isRoom(name,    prefix) {
	if (name in rooms) return 1
	for (prefix in other) {
		sub(/\/$/, "", prefix)
		if (index(name "/", prefix "/") == 1) return 0
	}
	return 1
}
function complain(text) { print "coverage: " text; failed = 1 }
BEGIN { least = 70; list(ENVIRON["OTHER"], other); list(ENVIRON["ROOMS"], rooms) }
match($0, /coverage: [0-9.]+% of statements/) {
	covered = substr($0, RSTART + 10) + 0
	room = $1 == "ok" ? $2 : $1
	sub(/^github\.com\/outbox-relay\/outbox-relay\//, "", room)
	if (covered >= least || !isRoom(room)) next
	if ($1 == "ok") complain(room " reaches " covered " % from its own tests, not " least)
	else complain(room " has no tests in its directory")
}
END {
	if (failed) print "FAIL"
	exit failed
}' "$work/output"
