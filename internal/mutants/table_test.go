package mutants

var mutants = []mutant{
	{
		bug: "delivered is written before the POST", file: "internal/relay/send/send.go",
		old: "\t\t\tv = s.attempt(l, d)\n",
		new: "\t\t\tdone := policy.Result{Reason: policy.ReasonOK, Posted: true, StatusCode: 204}\n" +
			"\t\t\ts.Settle(d.Settlement(policy.Decide(done, policy.Circumstances{}), started, 0))\n\t\t\tv = s.attempt(l, d)\n",
		pkg: "relay", test: "^TestRetryThenSuccess$", says: "is not attempt",
	},
	{
		bug: "a lease need not outlast the timeout", file: "relay/config.go",
		old: "c.Lease >= d.Timeout+leaseMargin", new: "c.Lease > 0",
		pkg: "relay", test: "^TestEveryMistakeIsFound$", says: "lease below timeout: []",
	},
	{
		bug: "receiver answers before commit", file: "consumer/receiver.go",
		old: "\tif err := taken.Remember(", new: "\trc.finish(w, r, rq, report, answer)\n\tif err := taken.Remember(",
		pkg: "consumer", test: "^TestFailedCommitIsNeverAnsweredAsSuccess$", says: "status 200, body",
	},
	{
		bug: "dedupe by a plain insert", file: "consumer/internal/memory/store.go",
		old: "ON CONFLICT ON CONSTRAINT processed_events_pkey DO NOTHING\nRETURNING", new: "RETURNING",
		pkg: "consumer", test: "^TestFirstThenDuplicate$", says: "want \"duplicate\"",
	},
	{
		bug: "no fence in the settle of a row", file: "internal/relay/settle/store.go",
		old: "WHERE d.ctid = found.place AND d.claim = s.claim AND", new: "WHERE d.ctid = found.place AND",
		pkg: "internal/relay/settle", test: "^TestStaleSettlementsChangeNothing$", says: "late settlements turned",
	},
	{
		bug: "no fence in the settle of a range", file: "internal/relay/intake/store_settle.go",
		old: "o.fence = w.fence AND o.relay_id = $1::int AND ", new: "$1::int > 0 AND ",
		pkg: "internal/relay/intake", test: "^TestSettleStale$", says: "written: [1 2], want [2]",
	},
	{
		bug: "redirects are followed", file: "internal/relay/post/transport.go",
		old: "resp, err = e.Transport.RoundTrip(", new: "resp, err = (&http.Client{Transport: e.Transport}).Do(",
		pkg: "internal/relay/post", test: "^TestRedirectsAreNeverFollowed$", says: "requests reached the other server",
	},
	{
		bug: "net http may send the body again", file: "internal/relay/post/request.go",
		old: "func (r *Request) HTTP(payload []byte) *http.Request {\n\treturn &http.Request{\n",
		new: "func bodyAgain[T any](v T) func() (T, error) { return func() (T, error) { return v, nil } }\n\n" +
			"func (r *Request) HTTP(payload []byte) *http.Request {\n\treturn &http.Request{\n\t\tGetBody: bodyAgain(newBody(payload)),\n",
		pkg: "internal/relay/post", test: "^TestRequestIsTheWireContract$", says: "with GetBody, net/http sends",
	},
	{
		bug: "a backoff instead of the schedule", file: "internal/relay/policy/retry.go",
		old: "scheduled := p.Schedule[index]", new: "scheduled := 500 * time.Millisecond << index",
		pkg: "internal/relay/policy", test: "^TestDelayFollowsTheScheduleAndTheLastRepeats$", says: "after attempt 1: 500ms, want 5s",
	},
	{
		bug: "breaker burns attempts", file: "internal/relay/policy/decide.go",
		old: "case c.AtFault:\n\t\treturn Hold", new: "case c.AtFault:\n\t\treturn Retry",
		pkg: "internal/relay/policy", test: "^TestDestinationAtFaultSpendsNoAttempt$", says: "attempt 1: retry, want hold",
	},
	{
		bug: "late commits are lost", file: "internal/relay/intake/store.go",
		old: "WHERE NOT l.more AND pg_visible_in_snapshot(x.xid, l.target)", new: "WHERE false",
		pkg: "internal/relay/intake", test: "^TestTakeLateCommits$", says: "took \"d\", want \"late later d\"",
	},
	{
		bug: "a lost notification is not made up for", file: "relay/claimer.go",
		old: "c.agenda.At(agenda.CauseTick, now.Add(c.pollInterval))", new: "c.agenda.At(agenda.CauseTick, now.Add(1000*c.pollInterval))",
		pkg: "relay", test: "^TestLostNotificationIsMadeUpFor$", says: "the next turn comes after 16m",
	},
	{
		bug: "two relays take one key", file: "internal/relay/intake/store.go",
		old: "s.events BETWEEN 1 AND $2 AND NOT (p.busy AND s.keys IS NOT NULL)", new: "s.events BETWEEN 1 AND $2",
		pkg: "internal/relay/intake", test: "^TestKeysStay$", says: "with 1 events, want \"busy\"",
	},
	{
		bug: "a rescued range keeps its fence", file: "internal/relay/intake/store_takeover.go",
		old: "SET relay_id = $1, fence = (greatest(fence, ` + fenceNow + `) | 1) + 1", new: "SET relay_id = $1",
		pkg: "internal/relay/intake", test: "^TestRescue$", says: "true, \"e1 e2 e3\" of",
	},
	{
		bug: "a header is left out of the signature", file: "internal/relay/post/request.go",
		old: "covered = webhook.AppendCovered(covered, h.name, h.value)",
		new: "if h.name != webhook.OrderingKey {\n\t\t\tcovered = webhook.AppendCovered(covered, h.name, h.value)\n\t\t}",
		pkg: "internal/relay/post", test: "^TestRequestIsTheWireContract$", says: "verified 1, <nil>",
	},
	{
		bug: "event headers are left out of the signature", file: "internal/relay/post/request.go",
		old: "r.setContract(appendCovered(text, r.header), d)", new: "r.setContract(text, d)",
		pkg: "internal/relay/post", test: "^TestSecurityOwnHeadersAreSigned$", says: "is verified by 1",
	},
	{
		bug: "a receiver believes unsigned headers", file: "internal/webhook/headers.go",
		old: ` || strings.HasPrefix(name, "X-Event-")`, new: "",
		pkg: "internal/webhook", test: "^TestX1BindsTheHeaders$", says: "TestX1BindsTheHeaders/other_tenant",
	},
	{
		bug: "a replay is left out of the signature", file: "internal/relay/post/request.go",
		old: "covered = webhook.AppendCovered(covered, h.name, h.value)",
		new: "if h.name != webhook.Replay {\n\t\t\tcovered = webhook.AppendCovered(covered, h.name, h.value)\n\t\t}",
		pkg: "internal/relay/post", test: "^TestReplayIsSigned$", says: "the signature covers a request without the header",
	},
	{
		bug: "prune ignores the retention", file: "migrations/inbox/00003_prune.sql",
		old: "cutoff    timestamptz := now() - older_than;", new: "cutoff    timestamptz := now() - least(older_than, interval '25 hours');",
		pkg: "consumer/internal/memory", test: "^TestPruneAnnouncesBeforeItRemoves$", says: "remembers since 25h",
	},
	{
		bug: "prune ignores until when duplicates may come", file: "migrations/inbox/00003_prune.sql",
		old: "AND e.since < cutoff AND (e.not_after < now()) IS NOT FALSE", new: "AND e.since < cutoff",
		pkg: "consumer/internal/memory", test: "^TestPruneKeepsWhatIsStillNeeded$", says: "want 0 removed, 400 announced",
	},
	{
		bug: "a living relay is rescued", file: "internal/relay/session/store_dead.go",
		old: "(SELECT id FROM relay r WHERE ` + isDead + `)", new: "(SELECT id FROM relay r)",
		pkg: "internal/relay/session", test: "^TestRelayThatComesBackDuringItsRescue$", says: "rescued: true",
	},
	{
		bug: "the range of a living relay is taken over", file: "internal/relay/intake/store_takeover.go",
		old: "ELSE NOT EXISTS (SELECT FROM outbox_relay a WHERE a.id = o.relay_id) END", new: "ELSE true END",
		pkg: "internal/relay/intake", test: "^TestRescue", says: "of a relay that lives",
	},
}
