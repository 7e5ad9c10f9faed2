package watch

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
)

// sample is a look as the database stores it.
type sample struct {
	own     bool // this relay looked
	at, now time.Time

	Terms    terms        `json:"terms"`
	Database string       `json:"database"`
	Lanes    []laneSample `json:"lanes"`
	// Counted is for how long the oldest due delivery of each destination has waited while looks
	// found nothing that held it. Nil: an older relay looked, or none has due ones.
	Counted map[string]float64 `json:"counted"`
	Untaken untakenSample      `json:"untaken"`
	Parked  *parkedSample      `json:"parked"`

	Undelivered *UndeliveredSample `json:"undelivered"`

	Misconfigured []failingSample `json:"misconfigured"`
	Failing       []failingSample `json:"failing"`

	VacuumBlockers []struct {
		Kind         string  `json:"kind"`
		PID          int     `json:"pid"`
		Application  string  `json:"application"`
		User         string  `json:"user"`
		State        string  `json:"state"`
		Name         string  `json:"name"`
		Seconds      float64 `json:"seconds"`
		StateSeconds float64 `json:"state_seconds"`
	} `json:"holders"`
	Tracked []struct {
		Kind         string    `json:"kind"`
		Name         string    `json:"name"`
		Transactions int64     `json:"transactions"`
		Active       bool      `json:"active"`
		Since        time.Time `json:"since"`
	} `json:"tracked"`
	Hidden    int              `json:"hidden"`
	Dead      map[string]int64 `json:"dead"`
	LockWaits int              `json:"lock_waits"`
	Rescues   struct {
		Relays int `json:"relays"`
	} `json:"rescues"`
	Alerts []alertSample `json:"alerts"`
	// Refused are relays that could not read their configuration again.
	Refused []refusedSample `json:"refused"`
	Differ  []Difference    `json:"differ"`
	// Refusals are of relays that a destination refuses alone.
	Refusals []Refusal      `json:"refusals"`
	Archive  *archiveSample `json:"archive"`
	// Unserved are destinations with pending deliveries that no registered relay serves.
	Unserved []unservedSample `json:"unserved"`
}

// alertSample is an alert that is open.
type alertSample struct {
	subject
	Failed bool      `json:"failed"`  // failed deliveries are left
	Event  int64     `json:"event"`   // the first that it names
	LastAt time.Time `json:"last_at"` // when its condition was noted last
	Left   bool      `json:"left"`    // nothing leads to the destination any more, or waits for it; relays agree about routes
}

type laneSample struct {
	Destination    string  `json:"destination"`
	Held           bool    `json:"held"`
	PausedSeconds  float64 `json:"paused"` // 0: it is not paused
	PausedReason   string  `json:"paused_reason"`
	LagSeconds     float64 `json:"seconds"`
	Event          int64   `json:"event"`
	Blocked        int     `json:"blocked"`
	BlockedSeconds float64 `json:"blocked_seconds"`
	BlockedKey     string  `json:"blocked_key"`
	BlockedEvent   int64   `json:"blocked_event"`
	Waiting        int     `json:"waiting"`
	WaitingSeconds float64 `json:"waiting_seconds"`
	WaitingKey     string  `json:"waiting_key"`
	WaitingEvent   int64   `json:"waiting_event"`
	WaitingUntil   string  `json:"waiting_until"` // in UTC, as text: a year beyond 9999 is no JSON time; empty: it is due by now
}

// A failingSample is a destination at which attempts fail, the first of event Event.
type failingSample struct {
	Destination string  `json:"destination"`
	Attempts    int64   `json:"attempts"`
	Event       int64   `json:"event"`
	Error       string  `json:"error"`   // of the latest
	Seconds     float64 `json:"seconds"` // since the first attempt of that event or, of Failing, since something was accepted, if that was later
}

// An UndeliveredSample counts the events without deliveries that are remembered.
type UndeliveredSample struct {
	Count int   `json:"count"`
	Event int64 `json:"event"`
}

// An untakenSample counts the events that no relay has taken.
type untakenSample struct {
	Count   int     `json:"count"`
	Seconds float64 `json:"seconds"`
}

type parkedSample struct {
	Count   int     `json:"count"`
	Seconds float64 `json:"seconds"`
	Event   int64   `json:"event"`
	Type    string  `json:"type"`
}

type refusedSample struct {
	Relay   string  `json:"relay"`
	Error   string  `json:"error"`
	Seconds float64 `json:"seconds"`
}

type archiveSample struct {
	At    time.Time `json:"at"` // when it last ran to its end
	Error string    `json:"error"`
}

// A Difference names the relays that have different settings of a destination.
type Difference struct {
	Destination string `json:"destination"`
	// Secrets: nothing but the secrets differs.
	Secrets bool `json:"secrets"`
	// Relays, those that agree together.
	Relays [][]string `json:"relays"`
}

// String names what differs and which relays disagree; the fewest first, as they are the ones to
// look at.
func (d Difference) String() string {
	groups := slices.SortedStableFunc(slices.Values(d.Relays), func(a, b []string) int { return cmp.Compare(len(a), len(b)) })
	var names []string
	for _, group := range groups {
		if len(group) > 3 {
			group = append(slices.Clone(group[:3]), fmt.Sprintf("%d more", len(group)-3))
		}
		names = append(names, plain.Clip(strings.Join(group, " and ")))
	}
	what := "settings"
	if d.Secrets {
		what = "secrets"
	}
	return "other " + what + " at " + strings.Join(names, " than at ")
}

// A Refusal names the relays that a destination refuses while another relay may be accepted.
type Refusal struct {
	Destination string   `json:"destination"`
	Relays      []string `json:"relays"`
	Error       string   `json:"error"`   // of the latest
	Seconds     float64  `json:"seconds"` // since the first was refused
}

// Only names the relays.
func (r Refusal) Only() string {
	names, relay := r.Relays, "relay"
	if len(names) > 1 {
		relay = "relays"
	}
	if len(names) > 3 {
		names = append(slices.Clone(names[:3]), fmt.Sprintf("%d more", len(names)-3))
	}
	return "only " + relay + " " + plain.Clip(strings.Join(names, " and "))
}

// terms are what the relay that looks has configured and learnt, for those that read its look.
type terms struct {
	LagOverSeconds           float64 `json:"lag_over"`
	VacuumBlockedOverSeconds float64 `json:"vacuum_blocked_over"`
	// Learnt are the destinations that get fewer requests at once than are configured.
	Learnt map[string]Learnt `json:"learnt"`
}

// encode returns the terms as JSON. As a text they pass through every mode of a pooler.
func (t terms) encode() string {
	encoded, _ := json.Marshal(t) // no value of its fields is refused
	return string(encoded)
}

// limits returns the limits of the terms.
func (t terms) limits() alert.Config {
	return alert.Config{LagOver: inSeconds(t.LagOverSeconds), VacuumBlockedOver: inSeconds(t.VacuumBlockedOverSeconds)}
}

// Learnt is what flow control of one relay has found of a destination.
type Learnt struct {
	Relay      string `json:"relay"`
	AtOnce     int    `json:"at_once"`    // requests that it sends there at once
	Configured int    `json:"configured"` // requests that it may send
}

// String says what follows for who would raise the limit.
func (l Learnt) String() string {
	return fmt.Sprintf("relay %q sends at most %s at once there, of %d that it may, as timeouts, 503s or slow answers have taught it: a higher max_in_flight changes nothing",
		plain.Clip(l.Relay), plain.Plural(int64(l.AtOnce), "request", "requests"), l.Configured)
}

func inSeconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func (s *sample) watch() Watch {
	w := Watch{
		At: s.at, Database: s.Database, VacuumBlockers: s.vacuumBlockers(), HiddenSessions: s.Hidden,
		DeadTuples: s.Dead, LockWaits: s.LockWaits, Rescues: s.Rescues.Relays,
		Untaken: s.Untaken.Count, UntakenFor: inSeconds(s.Untaken.Seconds),
	}
	for _, l := range s.Lanes {
		w.Lanes = append(w.Lanes, LaneWatch{
			Destination: l.Destination, Held: l.Held, Lag: inSeconds(l.LagSeconds),
			BlockedKeys: l.Blocked, BlockedFor: inSeconds(l.BlockedSeconds),
			WaitingKeys: l.Waiting, WaitingFor: inSeconds(l.WaitingSeconds),
		})
	}
	if s.Parked != nil {
		w.Parked, w.ParkedFor = s.Parked.Count, inSeconds(s.Parked.Seconds)
	}
	if s.Undelivered != nil {
		w.Undelivered = s.Undelivered.Count
	}
	return w
}

// vacuumBlockers returns what blocks vacuum, the longest first. The oldest transaction of the
// server explains nothing if there is a session to name, or none that cannot be seen.
func (s *sample) vacuumBlockers() (all []VacuumBlocker) {
	for _, h := range s.VacuumBlockers {
		all = append(all, VacuumBlocker{
			Kind: h.Kind, PID: h.PID, Application: h.Application, User: h.User, State: h.State, Name: h.Name, Active: true,
			For: inSeconds(h.Seconds), StateFor: inSeconds(h.StateSeconds),
		})
	}
	for _, t := range s.Tracked {
		held := s.at.Sub(t.Since)
		explained := slices.ContainsFunc(all, func(h VacuumBlocker) bool { return h.For >= held })
		switch {
		case t.Kind == "unseen" && (s.Hidden == 0 || explained || t.Transactions == 0):
		case t.Kind != "unseen" && t.Transactions < trackedTransactions:
		default:
			all = append(all, VacuumBlocker{Kind: t.Kind, Name: t.Name, Active: t.Active, For: held})
		}
	}
	slices.SortStableFunc(all, func(a, b VacuumBlocker) int { return cmp.Compare(b.For, a.For) })
	return all
}

// MaxUndelivered is up to how many events without deliveries are remembered.
const MaxUndelivered = 1_000

// String says how many there are, and what to do.
func (u *UndeliveredSample) String() string {
	found := plain.Plural(int64(u.Count), "event has", "events have")
	if u.Count > MaxUndelivered {
		found = fmt.Sprintf("more than %d events have", MaxUndelivered)
	}
	return fmt.Sprintf("%s no delivery, the first of them event %d: no relay takes them for new, as their rows were loaded from another server or their deliveries deleted; create what is missing: "+
		"outbox-relay events create-deliveries", found, u.Event)
}

// An unservedSample is a destination with pending deliveries that no registered relay serves.
type unservedSample struct {
	Destination string `json:"destination"`
	Pending     int    `json:"pending"`
}
