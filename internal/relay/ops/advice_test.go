package ops

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Each problem alone: what is said of it, and which commands come next, each before its comment.
func TestAdvice(t *testing.T) {
	t.Parallel()
	alive := []RelayStatus{{Name: "a"}}
	const list = "outbox-relay events list --status failed --destination d"
	lane := func(d DestinationStatus) Status {
		d.Destination, d.Routed, d.Served = "d", !d.Routed, !d.Served
		if d.Breaker == "" {
			d.Breaker = "closed"
		}
		return Status{Relays: alive, Destinations: []DestinationStatus{d}}
	}
	now := time.Now()
	before := now.Add(-time.Minute)
	for name, c := range map[string]struct {
		s        Status
		text     string // a part of it
		commands []string
	}{
		"well":        {lane(DestinationStatus{Pending: 3, Due: 3}), "", nil},
		"no relay":    {Status{Relays: []RelayStatus{{HeartbeatAgeSeconds: 11}}}, "No relay is running", []string{"outbox-relay run"}},
		"quarantined": {Status{Relays: alive, Quarantined: "a copy"}, "Nothing is claimed or sent: a copy.", []string{"outbox-relay identity show"}},
		"quarantined, and unserved": {
			Status{Relays: alive, Quarantined: "a copy", Destinations: []DestinationStatus{{Destination: "d", Routed: true, Pending: 5, Breaker: "closed"}}},
			"Nothing is claimed or sent: a copy.",
			[]string{"outbox-relay identity show"},
		},
		"paused":                   {lane(DestinationStatus{Paused: true, PausedReason: "holiday"}), `"d" is paused (holiday)`, []string{"outbox-relay resume d"}},
		"held":                     {lane(DestinationStatus{Breaker: "open", BreakerError: "refused"}), `"d" is down, and its deliveries are held: refused.`, []string{"outbox-relay resume d --reset-breaker"}},
		"held, and due":            {lane(DestinationStatus{Breaker: "open", Due: 1, Retrying: 3, RetryReason: policy.ReasonConnect}), `"d" is down`, []string{"outbox-relay resume d --reset-breaker", "outbox-relay retry --destination d"}},
		"held, and nothing is due": {lane(DestinationStatus{Breaker: "open", Retrying: 3, RetryReason: policy.ReasonConnect}), "every few seconds, with what is due. The log of the receiver says more. An event that alone is answered with errors follows the schedule, and spends attempts", []string{"outbox-relay retry --destination d"}},
		"held, asked to wait":      {lane(DestinationStatus{Breaker: "open", BreakerError: "503 Service Unavailable", WaitUntil: &now}), "it has asked to wait (Retry-After), for a minute at most, and no relay tries it before", []string{"outbox-relay resume d --reset-breaker"}},
		"tried, and nothing waits": {lane(DestinationStatus{Breaker: "half_open", BreakerError: "dial tcp: connection refused"}), "", nil},
		"delivered since": {
			lane(DestinationStatus{Retrying: 2, RetryReason: policy.ReasonUnauthorized, RetryError: "401", RetryAt: &before, LastDeliveredAt: &now}),
			`2 retrying at d; last: 401. "d" has accepted other events since.`,
			[]string{"outbox-relay explain 0", "outbox-relay retry --destination d"},
		},
		"retrying, and some wait behind it": {
			lane(DestinationStatus{Retrying: 2, RetryReason: policy.ReasonServerError, RetryError: "500", WaitingBehind: []WaitingHead{{EventID: 8, Waiting: 4, Key: "k", Status: "pending", Attempts: 1}, {EventID: 9, Waiting: 1, Key: "l", Status: "pending", Attempts: 2}}}),
			"2 retrying at d; last: 500. 4 deliveries wait behind event 8, 1 delivery waits behind event 9.",
			[]string{"outbox-relay explain 0", "outbox-relay retry --destination d"},
		},
		"wrong secret": {lane(DestinationStatus{Retrying: 4, RetryReason: policy.ReasonUnauthorized, RetryError: "401 signature-invalid.", RetryEventID: 7}), "4 retrying at d; last: 401 signature-invalid. Make destinations.d.signing_secrets (or its credentials) those of the receiver, then reload the relay (SIGHUP), or restart it if a variable holds them.", []string{"outbox-relay explain 7", "outbox-relay retry --destination d"}},
		"wrong path":   {lane(DestinationStatus{Retrying: 1, RetryReason: policy.ReasonNotFound, RetryError: "404 Not Found"}), "Correct destinations.d.url, then reload the relay (SIGHUP)", []string{"outbox-relay explain 0", "outbox-relay retry --destination d"}},
		"wrong path, perhaps of the environment": {
			Status{Relays: alive, Destinations: []DestinationStatus{{Destination: "default", Routed: true, Served: true, Breaker: "closed", Retrying: 1, RetryReason: policy.ReasonNotFound}}},
			"Correct destinations.default.url (or OUTBOX_DESTINATION_URL), then reload the relay (SIGHUP), or restart it if the environment sets it, or fix the receiver.",
			[]string{"outbox-relay explain 0", "outbox-relay retry --destination default"},
		},
		"missing stream": {
			lane(DestinationStatus{Retrying: 1, RetryReason: policy.ReasonNotFound, RetryError: `there is no stream "EVENTS"; create it with the subject "outbox.paid", or correct the destination's stream`}),
			"stream. Create the stream: nats stream add 'EVENTS' --subjects 'outbox.paid' (or a pattern that covers all its subjects), or correct destinations.d.nats.stream and",
			[]string{"outbox-relay explain 0", "outbox-relay retry --destination d"},
		},
		"missing topic, held": {
			lane(DestinationStatus{Breaker: "open", BreakerError: `UNKNOWN_TOPIC_OR_PARTITION (3): there is no topic "paid", or the user may not see it; create it, or correct the destination's topic`}),
			"Create the topic paid, or give the relay's user the right to see it, or correct destinations.d.kafka.topic",
			[]string{"outbox-relay resume d --reset-breaker"},
		},
		"full stream, held": {
			lane(DestinationStatus{Breaker: "open", BreakerError: `maximum messages exceeded (10077): the stream "EVENTS" is full and discards new messages; raise its limits, or remove messages`}),
			"Do what the error says, or correct destinations.d.nats.stream",
			[]string{"outbox-relay resume d --reset-breaker"},
		},
		"a receiver that speaks of a stream": {
			lane(DestinationStatus{Breaker: "open", BreakerError: `503 Service Unavailable: stream "x" is down`}), "The log of the receiver says more.", []string{"outbox-relay resume d --reset-breaker"},
		},
		"held, wrong secret": {lane(DestinationStatus{Breaker: "open", BreakerError: "401 Unauthorized"}), `"d" refuses the relay's credentials or signature, and its deliveries are held: 401 Unauthorized. Nothing is lost: a relay tries it every few seconds, with what is due. Make destinations.d.signing_secrets`, []string{"outbox-relay resume d --reset-breaker"}},
		"held, wrong clock": {
			lane(DestinationStatus{Breaker: "open", BreakerError: "401 timestamp-out-of-tolerance: The request is not recent."}),
			`"d" finds the time of the relay's requests too far from its own clock, and its deliveries are held: 401 timestamp-out-of-tolerance: The request is not recent. Nothing is lost: a relay tries it every few seconds, with what is due. The clocks of the relay and the receiver differ: compare them`,
			[]string{"outbox-relay resume d --reset-breaker"},
		},
		"wrong clock": {
			lane(DestinationStatus{Retrying: 4, RetryReason: policy.ReasonUnauthorized, RetryError: "401 timestamp-out-of-tolerance", RetryEventID: 7}),
			"The clocks of the relay and the receiver differ",
			[]string{"outbox-relay explain 7", "outbox-relay retry --destination d"},
		},
		"held, wrong path":     {lane(DestinationStatus{Breaker: "open", BreakerError: "404 Not Found"}), "Correct destinations.d.url", []string{"outbox-relay resume d --reset-breaker"}},
		"held, late":           {lane(DestinationStatus{Breaker: "open", BreakerError: "read tcp 127.0.0.1:1: i/o timeout"}), "raise destinations.d.timeout", []string{"outbox-relay resume d --reset-breaker"}},
		"failed":               {lane(DestinationStatus{Failed: 1, FailedError: "422 no"}), `1 delivery to "d" failed; last: 422 no.`, []string{list, "outbox-relay replay --destination d"}},
		"failed, unsendable":   {lane(DestinationStatus{Failed: 1, FailedUnsendable: 1}), "1 of them cannot be sent as it is", []string{list, "outbox-relay discard --destination d --status failed --reason invalid_event"}},
		"failed, some of them": {lane(DestinationStatus{Failed: 9, FailedUnsendable: 1}), "1 of them cannot be sent as it is", []string{list, "outbox-relay discard --destination d --status failed --reason invalid_event", "outbox-relay replay --destination d --reason REASON"}},
		"failed, no route":     {lane(DestinationStatus{Failed: 2, Routed: true, Served: true}), "No route leads there", []string{list, "outbox-relay discard --destination d --status failed"}},
		"blocked": {
			lane(DestinationStatus{BlockedKeys: 5, WaitingBehind: []WaitingHead{{EventID: 3, Waiting: 2, Key: "it's", Status: "failed", Reason: policy.ReasonRejected}, {EventID: 4, Waiting: 1, Key: "b", Status: "failed", Reason: policy.ReasonInvalidEvent}}}),
			`5 ordering keys wait at "d" behind a failed delivery: it's: 2 wait behind event 3, failed (rejected), b: 1 waits behind event 4, failed (invalid_event), and 3 more. Fix the cause and replay the failed delivery, or skip it. No replay sends what cannot be sent as it is: the`,
			[]string{"outbox-relay explain 3", "outbox-relay replay 3 --destination d", `outbox-relay discard --destination d --head-of-key 'it'\''s'`, "outbox-relay explain 4", "outbox-relay discard --destination d --head-of-key b"},
		},
		"blocked, unsendable": {
			lane(DestinationStatus{BlockedKeys: 1, WaitingBehind: []WaitingHead{{EventID: 4, Waiting: 1, Key: "b", Status: "failed", Reason: policy.ReasonInvalidEvent}}}),
			"failed (invalid_event). No replay sends what cannot be sent as it is: the producer must insert a corrected event under a new key; then skip the failed one.",
			[]string{"outbox-relay explain 4", "outbox-relay discard --destination d --head-of-key b"},
		},
		"behind an early one": {
			lane(DestinationStatus{Waiting: 2, WaitingBehind: []WaitingHead{{EventID: 7, Waiting: 2, Key: "cust-1", Status: "pending", DueInSeconds: 7200}, {EventID: 8, Waiting: 2, Status: "pending", Attempts: 1, DueInSeconds: 60}}}),
			`2 deliveries wait at "d" behind event 7 of the ordering key cust-1, which its producer wants sent in 2h0m. It holds up what is due`,
			[]string{"outbox-relay explain 7", "outbox-relay discard 7 --destination d"},
		},
		"asked to wait": {
			lane(DestinationStatus{Pending: 5, Retrying: 2, WaitUntil: &now, RetryReason: policy.ReasonRateLimited}),
			`"d" asks to wait (Retry-After): it is tried again at ` + timeText(&now) + `, 5 deliveries wait until then. Nothing is lost. If it asks often, set destinations.d.rate_limit`,
			[]string{"outbox-relay resume d --reset-breaker"},
		},
		"unserved":               {lane(DestinationStatus{Pending: 5, Served: true}), `5 deliveries are unserved: no running relay has "d". To put it back, write destinations.d into a relay's configuration and reload that relay (SIGHUP)`, []string{"outbox-relay discard --destination d --status pending"}},
		"unserved, and retrying": {lane(DestinationStatus{Pending: 5, Retrying: 5, RetryReason: "server_error", Served: true}), `To put it back`, []string{"outbox-relay discard --destination d --status pending"}},
		"parked":                 {Status{Relays: alive, Parked: 1, Destinations: []DestinationStatus{{Routed: true, Served: true}}}, "1 event matches no route. Add a route to the relays' configuration and reload them (SIGHUP).", []string{"outbox-relay events list --parked"}},
		"not routed": {
			Status{Relays: alive, Untaken: Untaken{3, 61}},
			"3 events are not yet routed, the oldest for 1m1s: no relay has taken them. Relays refuse",
			[]string{"outbox-relay doctor"},
		},
		"not routed for a moment":  {Status{Relays: alive, Untaken: Untaken{3, 59}}, "", nil},
		"not routed, and lag":      {Status{Relays: alive, Untaken: Untaken{1, 900}, Alerts: []alert.Alert{{Rule: alert.RuleLag, Subject: "d"}}}, "1 event is not yet routed, the oldest for 15m", []string{"outbox-relay doctor"}},
		"lag":                      {Status{Relays: alive, Alerts: []alert.Alert{{Rule: alert.RuleLag, Subject: "d"}}}, `Deliveries to "d" lag`, []string{"outbox-relay relays"}},
		"a program's own":          {Status{Relays: alive, Alerts: []alert.Alert{{Rule: "disk_full", Subject: "db", Detail: "on node 3"}}}, `disk_full of "db": on node 3.`, nil},
		"routes changed":           {Status{Relays: alive, Alerts: []alert.Alert{{Rule: alert.RuleRoutesChanged, Subject: "db"}}}, "changed", []string{"outbox-relay routes list"}},
		"vacuum blocked":           {Status{Relays: alive, Alerts: []alert.Alert{{Rule: alert.RuleVacuumBlocked, Subject: "db", Detail: "process 7 holds"}}}, "cannot clean up: process 7 holds.", []string{"outbox-relay doctor"}},
		"no alert that is counted": {Status{Relays: alive, Alerts: []alert.Alert{{Rule: alert.RuleFailed, Subject: "d"}}}, "", nil},
	} {
		var texts, commands []string
		for _, a := range advise(c.s) {
			texts = append(texts, a.String())
			for _, command := range a.Commands {
				command, _, _ = strings.Cut(command, "    # ")
				commands = append(commands, command)
			}
		}
		if text := strings.Join(texts, "\n"); !strings.Contains(text, c.text) || (c.text == "") != (text == "") || strings.Contains(text, "restart") != (strings.Contains(text, "OUTBOX_") || strings.Contains(text, "if a variable holds")) || len(texts) > 1 {
			t.Errorf("%s: %s, want %s", name, text, c.text)
		}
		if !slices.Equal(commands, c.commands) {
			t.Errorf("%s: %q, want %q", name, commands, c.commands)
		}
	}
}

// Without a relay that runs, none tries what is held.
func TestAdviceOnAHeldDestinationWithoutARelay(t *testing.T) {
	t.Parallel()
	now := time.Now()
	all := advise(Status{Destinations: []DestinationStatus{{Destination: "d", Routed: true, Served: true, Breaker: "open", WaitUntil: &now}}})
	if got := fmt.Sprint(all); len(all) != 2 || !strings.Contains(got, "no running relay has it, so that none tries it") {
		t.Errorf("advice: %s", got)
	}
}

// No relay tries what is paused, also if it is held.
func TestAdviceOnAPausedDestinationThatIsHeld(t *testing.T) {
	t.Parallel()
	all := advise(Status{Relays: []RelayStatus{{}}, Destinations: []DestinationStatus{{Destination: "d", Routed: true, Served: true, Paused: true, Breaker: "open"}}})
	if got := fmt.Sprint(all); len(all) != 2 || !strings.Contains(got, "it is paused, and no relay tries it before it is resumed") || strings.Contains(got, "every few seconds") {
		t.Error(got)
	}
	for d, state := range map[*DestinationStatus]string{{Breaker: "open", Served: true}: "held", {Breaker: "open", Pending: 1}: "unserved", {Breaker: "open"}: "no route"} {
		testkit.Equal(t, "state", d.state(), state)
	}
}

// Before a relay has ever run there is no route: what is parked is no mistake.
func TestAdviceBeforeTheFirstStart(t *testing.T) {
	t.Parallel()
	all := advise(Status{Parked: 3})
	last := all[len(all)-1]
	if got := fmt.Sprint(last, last.Commands); len(all) != 2 || !strings.Contains(got, "3 events wait for the first relay: no route is stored yet") || !strings.Contains(got, "outbox-relay run") {
		t.Errorf("%+v", all)
	}
}

// What is said first is what a person must do something about. What only a person fixes is no mere
// notice.
func TestAdviceBeginsWithTheWorst(t *testing.T) {
	t.Parallel()
	lane := func(d DestinationStatus) DestinationStatus {
		d.Routed, d.Served, d.Breaker = true, true, cmp.Or(d.Breaker, "closed")
		return d
	}
	var got []string
	for _, a := range advise(Status{Relays: []RelayStatus{{Name: "a"}}, Destinations: []DestinationStatus{
		lane(DestinationStatus{Destination: "busy", Retrying: 1, RetryReason: policy.ReasonUnavailable}),
		lane(DestinationStatus{Destination: "misled", Retrying: 1, RetryReason: policy.ReasonUnauthorized}),
		lane(DestinationStatus{Destination: "refusing", Failed: 20_000}),
		lane(DestinationStatus{Destination: "down", Breaker: "open"}),
	}}) {
		got = append(got, string(a.Level)+" "+a.Destination())
	}
	if want := []string{"critical down", "warning misled", "warning refusing", "notice busy"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// The state of a destination is ok only if it is: one that refuses everything is failing, one that
// refuses some events is not.
func TestStateOfAFailingDestination(t *testing.T) {
	t.Parallel()
	now := time.Now()
	at := func(ago time.Duration) *time.Time { return new(now.Add(-ago)) }
	for name, c := range map[string]struct {
		d    DestinationStatus
		want string
	}{
		"nothing was tried":          {DestinationStatus{}, "ok"},
		"refuses all":                {DestinationStatus{RetryReason: policy.ReasonUnauthorized, RetryAt: at(0)}, "failing"},
		"was fixed":                  {DestinationStatus{RetryReason: policy.ReasonNotFound, RetryAt: at(time.Minute), LastDeliveredAt: at(0)}, "ok"},
		"broke lately":               {DestinationStatus{RetryReason: policy.ReasonServerError, RetryAt: at(0), LastDeliveredAt: at(time.Minute)}, "failing"},
		"refuses some":               {DestinationStatus{RetryReason: policy.ReasonServerError, RetryAt: at(0), LastDeliveredAt: at(time.Second)}, "ok"},
		"refused all, attempts over": {DestinationStatus{FailedReason: policy.ReasonServerError, FailedAt: at(0)}, "failing"},
		"fixed, and one failed":      {DestinationStatus{RetryReason: policy.ReasonNotFound, RetryAt: at(time.Hour), FailedReason: policy.ReasonRejected, FailedAt: at(0)}, "ok"},
		"an event is at fault":       {DestinationStatus{FailedReason: policy.ReasonInvalidEvent, FailedAt: at(0)}, "ok"},
		"paused":                     {DestinationStatus{Paused: true, RetryReason: policy.ReasonUnauthorized, RetryAt: at(0)}, "paused"},
		"asks to wait":               {DestinationStatus{Pending: 1, WaitUntil: at(0), RetryReason: policy.ReasonRateLimited, RetryAt: at(0)}, "slowed"},
		"asked to wait, all arrived": {DestinationStatus{WaitUntil: at(0)}, "ok"},
		"broke just now":             {DestinationStatus{RetryReason: policy.ReasonUnauthorized, RetryAt: at(0), LastDeliveredAt: at(3 * time.Second), Lately: 3, LatelySince: at(2 * time.Second)}, "failing"},
		"refuses three of many":      {DestinationStatus{RetryReason: policy.ReasonServerError, RetryAt: at(0), LastDeliveredAt: at(time.Second), Lately: 3, LatelySince: at(2 * time.Second)}, "ok"},
		"is slowed":                  {DestinationStatus{Pending: 1, SlowedTo: 3}, "slowed"},
		"no route any more":          {DestinationStatus{Routed: true, RetryReason: policy.ReasonUnauthorized, RetryAt: at(0)}, "failing"},
	} {
		c.d.Routed, c.d.Served, c.d.Breaker = !c.d.Routed, true, "closed"
		testkit.Equal(t, name, c.d.state(), c.want)
	}
}
