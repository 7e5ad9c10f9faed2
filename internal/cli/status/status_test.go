package status

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestPrintStatus(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("", 3600))
	var b bytes.Buffer
	err := output.Show(&b, false, ops.Status{
		Destinations: []ops.DestinationStatus{
			{Destination: "analytics", State: "blocked", LagSeconds: -3, Routed: true, Served: true, Breaker: "closed", BlockedKeys: 1, BlockedSeconds: 7200},
			{Destination: "billing", State: "unserved", Pending: 5, Breaker: "closed"},
			{Destination: "history", State: "no route", Failed: 1, Breaker: "closed"},
			{
				Destination: "logistics", State: "paused", Pending: 1200, Due: 20, InFlight: 64, Retrying: 3, Replays: 7, Failed: 12, LagSeconds: 252.04, Routed: true, Served: true,
				Paused: true, PausedReason: "410 \x1b[31m", PausedAt: &at, Breaker: "closed",
			},
			{Destination: "mail", State: "held", Routed: true, Served: true, Breaker: "open", BreakerOpenedAt: &at, BreakerSeconds: 12, BreakerError: "connection refused"},
			{Destination: "pager", State: "slowed", Pending: 3, Routed: true, Served: true, Breaker: "closed", SlowedTo: 12.345},
			{Destination: "paper", State: "slowed", Pending: 3, Routed: true, Served: true, Breaker: "closed", WaitUntil: &at, SlowedTo: 12},
			{Destination: "post", State: "trying", Routed: true, Served: true, Breaker: "half_open", BreakerOpenedAt: &at, BreakerSeconds: 12, BreakerError: "connection refused"},
		},
		Untaken: ops.Untaken{Events: 10_001, OldestSeconds: 61},
		Parked:  2,
		Relays: []ops.RelayStatus{
			{RelayID: 1, Name: "a", State: "idle", Version: "v1", StartedAt: at, HeartbeatAgeSeconds: 0.44, Idle: true},
			{RelayID: 2, Name: "b", State: "silent", Version: "v1", StartedAt: at, HeartbeatAgeSeconds: 10, InFlight: 50},
			{RelayID: 3, Name: "c", State: "busy", Version: "v1", StartedAt: at},
		},
		Alerts: []alert.Alert{{Rule: "failed", Subject: "logistics", Count: 3, OpenedAt: at, FirstEventID: 17, FirstError: "400 Bad\nRequest"}},
		Advice: []ops.Advice{{Text: "\"logistics\"\nis paused.", Commands: []string{"outbox-relay resume logistics"}}},
	}, Command{Limit: ops.MaxListed}.printStatus)
	testkit.Must(t, err)
	const want = `  DESTINATION  PENDING  DUE  IN FLIGHT  RETRY  REPLAY  FAILED    LAG     STATE
    analytics        0    0          0      0       0       0     0s   blocked
      billing        5    0          0      0       0       0     0s  unserved
      history        0    0          0      0       0       1     0s  no route
    logistics     1200   20         64      3       7      12  4m12s    paused
         mail        0    0          0      0       0       0     0s      held
        pager        3    0          0      0       0       0     0s    slowed
        paper        3    0          0      0       0       0     0s    slowed
         post        0    0          0      0       0       0     0s    trying
  analytics: ordering keys are blocked, the oldest for 2h
  logistics: paused since 2026-01-02T02:04:05Z: 410 �[31m
  mail: held since 2026-01-02T02:04:05Z, next probe in 12s: connection refused
  pager: slowed to 12.3/s by its 429s
  paper: asked to wait until 2026-01-02T02:04:05Z (Retry-After)
  post: held since 2026-01-02T02:04:05Z, a probe is under way: connection refused

Not yet routed: 10000+, the oldest for 1m1s
Parked: 2
Relays: 3
  1 a v1, idle, started 2026-01-02T02:04:05Z, last seen 400ms ago
  2 b v1, silent, started 2026-01-02T02:04:05Z, last seen 10s ago, 50 in flight
  3 c v1, busy, started 2026-01-02T02:04:05Z, last seen 0s ago
Open alerts: 1
  failed logistics: 3 times since 2026-01-02T02:04:05Z, first event 17: 400 Bad Request

`
	const steps = "\"logistics\" is paused.\n  outbox-relay resume logistics\n"
	if got := b.String(); got != want+steps {
		t.Errorf("got\n%s\nwant\n%s", got, want+steps)
	}
	for line := range strings.Lines(b.String()) {
		if isTable := !strings.Contains(line, ": "); isTable && utf8.RuneCountInString(line) > 81 {
			t.Errorf("%d columns: %s", utf8.RuneCountInString(line), line)
		}
	}
}

// Without a relay that runs, no probe is promised.
func TestPrintHeldWithoutARelay(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	testkit.Must(t, output.Show(&b, false, ops.Status{
		Destinations: []ops.DestinationStatus{{Destination: "mail", State: "held", Routed: true, Served: true, Breaker: "half_open", BreakerSeconds: 12, BreakerError: "refused"}},
		Relays:       []ops.RelayStatus{{RelayID: 1, Name: "a", State: "silent", HeartbeatAgeSeconds: 17}},
	}, Command{Limit: ops.MaxListed}.printStatus))
	if !strings.Contains(b.String(), "  mail: held, no running relay probes it: refused\n") {
		t.Errorf("status says\n%s", b.String())
	}
}

// An alert that is still open beside "All is well." is explained.
func TestEndingAlertsAreExplained(t *testing.T) {
	t.Parallel()
	for want, s := range map[bool]ops.Status{
		true:  {Alerts: []alert.Alert{{Rule: "lag", Subject: "shop"}}},
		false: {},
	} {
		var b bytes.Buffer
		testkit.Must(t, output.Show(&b, false, s, Command{Limit: ops.MaxListed}.printStatus))
		if said := strings.Contains(b.String(), "\nWhat they are about is over: they close soon.\n\nAll is well.\n"); said != want {
			t.Errorf("%v: %s", want, b.String())
		}
	}
}

// Where status and alerts lead, it stands which relay is meant.
func TestRelaysAreTold(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var b bytes.Buffer
	err := printRelays(output.NewTextWriter(&b, false), []ops.RelayStatus{
		{RelayID: 1, Name: "a", Called: "a", ReloadError: "line 3:\nno url", ReloadFailedAt: &at},
		{RelayID: 2, Name: "b", Called: "b", RefusedBy: []string{"mail", "shop"}},
		{RelayID: 3, Name: "c", Called: "c", Quarantined: "a copy"},
	}, []watch.Difference{{Destination: "shop", Secrets: true, Relays: [][]string{{"a", "c"}, {"b"}}}})
	testkit.Must(t, err)
	for _, want := range []string{
		"\na refused its new configuration since 2026-01-02T03:04:05Z: line 3: no url\n", "\nb is refused by mail, shop, and other relays are not\n", "\nc is quarantined: a copy\n",
		"\nshop has other secrets at b than at a and c\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("without %q:\n%s", want, b.String())
		}
	}
}

// The help of --json names every field.
func TestHelpNamesEveryField(t *testing.T) {
	t.Parallel()
	help := Command{}.Help()
	for _, of := range []reflect.Type{
		reflect.TypeFor[ops.Status](), reflect.TypeFor[ops.DestinationStatus](), reflect.TypeFor[ops.WaitingHead](), reflect.TypeFor[ops.Untaken](), reflect.TypeFor[ops.Listed](),
		reflect.TypeFor[ops.RelayStatus](), reflect.TypeFor[ops.Advice](), reflect.TypeFor[watch.Difference](), reflect.TypeFor[watch.Refusal](),
	} {
		for field := range of.Fields() {
			if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); !regexp.MustCompile(`\b` + name + `\b`).MatchString(help) {
				t.Errorf("%s of %s is not in the help", name, of)
			}
		}
	}
}

// Colours reach a terminal alone, and no text of others can bring its own.
func TestColors(t *testing.T) {
	t.Parallel()
	for _, colored := range []bool{false, true} {
		var b bytes.Buffer
		testkit.Must(t, printAdvice(output.NewTextWriter(&b, colored), []ops.Advice{{Text: "wrong \x1b[31m"}}, 0))
		want := "wrong \ufffd[31m\n"
		if colored {
			want = output.Yellow + want + output.NoColor
		}
		if b.String() != want {
			t.Errorf("%q, want %q", b.String(), want)
		}
	}
	if output.ShowsColors(os.Stdout, []string{"NO_COLOR=1"}) {
		t.Error("NO_COLOR has no effect")
	}
}

// Of thousands of destinations a person is shown those that matter.
func TestStatusOfManyDestinations(t *testing.T) {
	t.Parallel()
	s := ops.Status{Advice: []ops.Advice{{Subject: "d4000", Text: "d4000 is down."}}}
	for i := range 5000 {
		d := ops.DestinationStatus{Destination: fmt.Sprintf("d%04d", i), Breaker: "closed", Routed: true, Served: true}
		if i%500 == 499 {
			d.Pending = 7
		}
		s.Destinations = append(s.Destinations, d)
		s.Alerts = append(s.Alerts, alert.Alert{Rule: "lag", Subject: d.Destination})
		if i > 0 {
			s.Advice = append(s.Advice, ops.Advice{Subject: "other", Text: "x"})
		}
	}
	s, err := s.Bounded(ops.List{Prefix: "d"})
	testkit.Must(t, err)
	var b bytes.Buffer
	testkit.Must(t, output.Show(&b, false, s, Command{Prefix: "d", Limit: ops.MaxListed}.printStatus))
	text := b.String()
	for _, part := range []string{
		"d0499", "d4999", "d4000", "d0000", "\n4900 more destinations: outbox-relay status --prefix d --after d0088\n", "\nOpen alerts: 5000\n",
		"  and 4900 more\n\n", "\n4994 more problems; what to do: outbox-relay doctor\n", "x\n  and 4900 more\n",
	} {
		if !strings.Contains(text, part) {
			t.Errorf("lacks %q", part)
		}
	}
	if len(text) > 32<<10 {
		t.Errorf("%d bytes", len(text))
	}
}
