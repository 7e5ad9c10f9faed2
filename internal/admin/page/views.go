package page

import (
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// overviewData is what the first page shows.
type overviewData struct {
	control.Overview
	chartsData
	// Sees reports whether the database has answered.
	Sees bool
	// List is which destinations are shown.
	List control.List
}

// ListQuery returns the query of the destinations of a prefix in an order, from after one of them
// on. It keeps the span.
func (d overviewData) ListQuery(prefix, sort, after string) string {
	q := url.Values{}
	for name, value := range map[string]string{"prefix": prefix, "sort": sort, "after": after, "span": d.Span.Name} {
		if value != "" && (name != "span" || value != "1h") {
			q.Set(name, value)
		}
	}
	return query(q)
}

// chartsData is the history that a page shows. History is false if it is switched off.
type chartsData struct {
	Past    history.Past
	Span    history.Span
	Base    string // the path of the page
	History bool
	query   url.Values // of the request
}

// SpanQuery returns the query of the same page with another span.
func (d chartsData) SpanQuery(span string) string {
	q := maps.Clone(d.query)
	q.Del("done")
	q.Set("span", span)
	return query(q)
}

// Spans returns those to choose from.
func (chartsData) Spans() []history.Span { return history.Spans() }

func (p *Page) charts(r *http.Request, destination string) (chartsData, error) {
	q := r.URL.Query()
	span := history.SpanOf(q.Get("span"))
	past, err := p.Control.Past(r.Context(), destination, span)
	return chartsData{past, span, r.URL.EscapedPath(), p.Control.History != nil, q}, err
}

func (p *Page) overview(r *http.Request) (view, error) {
	q := r.URL.Query()
	q.Del("limit")
	data := overviewData{}
	list, err := control.ParseList(q)
	if err == nil {
		data.List = list
		data.Overview, err = p.Control.Overview(r.Context(), list)
	}
	if data.Sees = err == nil; err == nil {
		data.chartsData, err = p.charts(r, "")
	}
	live := list.After == "" || list.Sort == "name" // in another order the page would move away from its reader
	return view{Template: "overview.html", Title: "Overview", Live: live, Data: data}, err
}

// Columns are those by which destinations can be sorted: the parameter, its heading, and its class.
func (overviewData) Columns() [][3]string {
	return [][3]string{
		{"name", "Destination", ""},
		{"state", "State", ""},
		{"delivered", "Delivered, 1 h", "num wide"},
		{"pending", "Pending", "num"},
		{"retrying", "Retrying", "num wide"},
		{"failed", "Failed", "num"},
		{"lag", "Lag", "num wide"},
		{"p95", "p95, 1 h", "num wide"},
	}
}

// A headline says what is wrong.
type headline struct {
	Text, Level string
	Single      bool // it is the first advice alone
}

// Headline returns the one thing that is wrong, or at how many destinations something is.
func (d overviewData) Headline() headline {
	first := d.Advice[0]
	subjects, others := map[string]bool{}, 0
	for _, a := range d.Advice {
		switch {
		case a.Level == ops.Notice:
		case a.Destination() == "":
			others++
		default:
			subjects[a.Destination()] = true
		}
	}
	h := headline{first.Text, string(first.Level), true}
	if len(subjects) > 1 && first.Destination() != "" {
		h.Text, h.Single = fmt.Sprintf("%d destinations need you", len(subjects)), false
		if others > 0 {
			h.Text += ", and " + plain.Plural(others, "thing", "things") + " more"
		}
	}
	return h
}

// More counts the findings after the first ones.
func (d overviewData) More() int {
	more := len(d.Advice) - maxFindings
	if d.Headline().Single {
		more--
	}
	return max(0, more)
}

// maxFindings is how many findings are shown at once.
const maxFindings = 10

// Findings returns the advice that the headline does not say: the first ones, and the rest, as far
// as it fits in.
func (d overviewData) Findings() [2][]ops.Advice {
	all, shown := d.Advice, maxFindings
	if d.Headline().Single {
		all = all[1:]
	}
	shown = min(shown, len(all))
	return [2][]ops.Advice{all[:shown], all[shown:min(shown+ops.MaxListed, len(all))]}
}

type destinationData struct {
	control.Destination
	chartsData
	Advice   []ops.Advice
	Failures []ops.FailureGroup
	Attempts []ops.Attempt
	Name     string
}

// Held reports whether a breaker keeps deliveries back.
func (d destinationData) Held() bool { return d.State == "held" || d.State == "trying" }

// Apart returns the failures beside what is held. A retry that ended as the hold began waits with
// all others, and is counted there.
func (d destinationData) Apart() []ops.FailureGroup {
	return slices.DeleteFunc(slices.Clone(d.Failures), func(f ops.FailureGroup) bool {
		return d.Held() && f.Status == "pending" && f.Reason == string(d.HeldFor())
	})
}

// Waits is how what is pending is called.
func (d destinationData) Waits() string {
	return map[string]string{"held": "Held", "trying": "Held", "paused": "Paused", "unserved": "Unserved"}[d.State]
}

// IsProbe reports whether an attempt was sent while the breaker was open. Those that opened it
// spent no attempt either.
func (d destinationData) IsProbe(a ops.Attempt) bool {
	return a.Outcome == policy.Hold && d.BreakerOpenedAt != nil && a.StartedAt.After(*d.BreakerOpenedAt)
}

// HeldFor returns why a breaker is open.
func (d destinationData) HeldFor() policy.Reason { return alert.ReasonOf(d.BreakerError) }

func (p *Page) destination(r *http.Request) (view, error) {
	name := r.PathValue("name")
	v := view{Title: name, Live: true}
	d, advice, err := p.Control.Destination(r.Context(), name)
	if err != nil {
		return view{}, err
	}
	data := destinationData{Destination: d, Advice: advice, Name: name}
	if data.Failures, err = p.Control.Outbox.Failures(r.Context(), name); err != nil {
		return v, err
	}
	if data.Attempts, err = p.Control.Outbox.LatestAttempts(r.Context(), name); err != nil {
		return v, err
	}
	data.chartsData, err = p.charts(r, name)
	v.Template, v.Data = "destination.html", data
	return v, err
}

// words are the states of destinations, for what waits there.
type words map[string]string

func (p *Page) words(r *http.Request) words {
	w := words{}
	if s, err := p.Control.Status(r.Context()); err == nil {
		for _, d := range s.Destinations {
			w[d.Destination] = d.State
		}
	}
	return w
}

// Word says what a delivery is in: what is pending where nothing is sent is held, paused or
// unserved.
func (w words) Word(status, destination string, attempts int) string {
	switch state := w[destination]; {
	case status != "pending":
	case destination == "":
		return "parked"
	case state == "held", state == "paused", state == "unserved":
		return state
	case state == "trying":
		return "held"
	case attempts > 0:
		return "retrying"
	}
	return status
}

// changeDestination does what a button of the destination's page says.
func (p *Page) changeDestination(r *http.Request, outbox *ops.Outbox) (to string, err error) {
	name := r.PathValue("name")
	var word string
	switch r.PathValue("action") {
	case "pause":
		word = "paused" // also by the first of two clicks
		_, err = outbox.Pause(r.Context(), name, r.PostForm.Get("reason"))
	case "resume":
		done, resumeErr := outbox.Resume(r.Context(), name, false)
		if word, err = "resumed", resumeErr; done.Breaker != "closed" {
			word = "resumed_held"
		}
	case "reset-breaker":
		word = "breaker_reset"
		_, err = outbox.ResetBreaker(r.Context(), name)
	default:
		return "", check.Problem{Path: "action", Text: "is not known"}
	}
	return "/destinations/" + url.PathEscape(name) + "?done=" + word, err
}

type eventsData struct {
	words
	Filter url.Values
	List   []ops.Delivery
	// Untaken events are not routed yet, and not listed; 0 where the filter leaves out what is
	// pending.
	Untaken int64
	// Searched is how far back was looked without filling the page; nil: all was looked at, or the
	// page is full.
	Searched *ops.Searched
	// Next is the query of the next page; empty: this is the last. First is that of the first one.
	Next, First  string
	Destinations []string
	Reasons      []string
	// Narrowed reports whether a button may act on all that match: the filter says something, and
	// not a reference, to which no index leads.
	Narrowed bool
	same     url.Values
	// Replays and Discards say which buttons make sense for the status.
	Replays, Discards bool
}

// Same returns the query that previews an action on all that match.
func (d eventsData) Same(action string) string {
	q := maps.Clone(d.same)
	q.Set("action", action)
	return query(q)
}

// pageSize is how many deliveries a page of the list has.
const pageSize = 50

func (p *Page) events(r *http.Request) (view, error) {
	q := url.Values{}
	for _, name := range control.FilterNames() {
		if value := r.URL.Query().Get(name); value != "" {
			q.Set(name, value)
		}
	}
	same := maps.Clone(q)
	same.Del("after")
	same.Del("limit")
	status := q.Get("status")
	data := eventsData{
		words: p.words(r), Filter: q, Reasons: ops.Reasons(), same: same, Narrowed: len(same) > 0 && !same.Has("related"), First: query(same),
		Replays:  status == "" || status == "failed" || status == "delivered" || status == "discarded",
		Discards: status == "" || status == "failed" || status == "pending" || status == "parked",
	}
	v := view{Template: "events.html", Title: "Events", Live: q.Get("after") == ""}
	var position *ops.DeliveryPosition
	filter, err := p.Control.Filter(r.Context(), q)
	if err == nil {
		filter.Limit = pageSize
		var list ops.DeliveryPage
		list, err = p.Control.Deliveries(r.Context(), filter)
		data.List, data.Searched, position = list.Deliveries, list.Searched, list.Next
	}
	if err == nil && position != nil {
		next := maps.Clone(same)
		next.Set("after", position.String())
		data.Next = query(next)
	}
	if err == nil && data.Filter.Get("after") == "" && (status == "" || status == "pending") {
		if s, statusErr := p.Control.Status(r.Context()); statusErr == nil {
			data.Untaken = s.Untaken.Events
		}
	}
	if names, namesErr := p.Control.Outbox.Destinations(r.Context()); namesErr == nil {
		data.Destinations = names
	}
	v.Data = data
	return v, err
}

type alertsData struct {
	Alerts []alert.Alert
	// Skip and Left count the open alerts before and after these; Next is Skip of the next page.
	Skip, Next, Left int
	// Ended within two weeks.
	Ended        []alert.Past
	Silences     []ops.Silence
	destinations []ops.DestinationStatus
}

// Known reports whether what an alert is about is a destination with a page.
func (d alertsData) Known(subject string) bool {
	return slices.ContainsFunc(d.destinations, func(one ops.DestinationStatus) bool { return one.Destination == subject })
}

func (p *Page) alerts(r *http.Request) (view, error) {
	v := view{Template: "alerts.html", Title: "Alerts", Live: r.URL.Query().Get("skip") == ""}
	s, err := p.Control.Status(r.Context())
	data := alertsData{destinations: s.Destinations}
	skip, limit, rangeErr := control.ParseRange(r.URL.Query())
	if err == nil {
		err = rangeErr
	}
	data.Skip = min(skip, len(s.Alerts))
	data.Alerts, data.Left = ops.Bound(s.Alerts[data.Skip:], limit)
	data.Next = data.Skip + len(data.Alerts)
	if err == nil {
		data.Ended, err = alert.Ended(r.Context(), p.Control.Outbox.DB())
	}
	if err == nil {
		data.Silences, err = p.Control.Outbox.Silences(r.Context())
	}
	v.Data = data
	return v, err
}

// silentFor is how long the button of an alert keeps it silent.
const silentFor = 2 * time.Hour

// changeAlert does what a button of the page of alerts says.
func (p *Page) changeAlert(r *http.Request, outbox *ops.Outbox) (to string, err error) {
	rule, subject := r.PostForm.Get("rule"), r.PostForm.Get("subject")
	var word string
	switch r.PathValue("action") {
	case "acknowledge":
		word, err = "acknowledged", outbox.AcknowledgeAlert(r.Context(), rule, subject)
	case "silence":
		word, err = "silenced", outbox.SilenceAlerts(r.Context(), rule, subject, silentFor, "from the page")
	case "unsilence":
		word, err = "unsilenced", outbox.SilenceAlerts(r.Context(), rule, subject, 0, "from the page")
	default:
		return "", check.Problem{Path: "action", Text: "is not known"}
	}
	return "/alerts?done=" + word, err
}

type relaysData struct {
	Relays []ops.RelayStatus
	// Advice about relays alone.
	Advice []ops.Advice
}

func (p *Page) relays(r *http.Request) (view, error) {
	s, err := p.Control.Status(r.Context())
	about := slices.DeleteFunc(slices.Clone(s.Advice), func(a ops.Advice) bool {
		return !slices.Contains([]string{alert.RuleQuarantined, alert.RuleNoRelay, alert.RuleReloadRefused, alert.RuleRelaysDiffer, alert.RuleRelayRefused, alert.RuleRescueStorm, alert.RuleRoutesChanged}, a.Rule)
	})
	about, _ = ops.Bound(about, ops.MaxListed)
	data := relaysData{Advice: about}
	for _, one := range s.Relays {
		data.Relays = append(data.Relays, one.Bounded(ops.MaxListed))
	}
	return view{Template: "relays.html", Title: "Relays", Live: true, Data: data}, err
}

type auditData struct {
	Entries []ops.AuditEntry
	Next    int64 // the parameter before of the next page; 0: this is the last
	First   bool
}

func (p *Page) audit(r *http.Request) (view, error) {
	v := view{Template: "audit.html", Title: "Audit", Live: true, Data: auditData{}}
	before := int64(0)
	if text := r.URL.Query().Get("before"); text != "" {
		var err error
		if before, err = control.ParseID("before", text); err != nil {
			return v, err
		}
	}
	entries, err := p.Control.Outbox.Audit(r.Context(), before, pageSize)
	data := auditData{Entries: entries, First: before == 0}
	if len(entries) == pageSize {
		data.Next = entries[pageSize-1].ID
	}
	v.Data, v.Live = data, data.First
	return v, err
}
