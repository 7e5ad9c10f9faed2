package page

import (
	"maps"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/history"
	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// overviewData is what the first page shows. History is there even while the database is away.
type overviewData struct {
	control.Overview
	History history.Series
	Lanes   map[string]history.Series
	// Sees reports whether the database has answered.
	Sees bool
}

func (p *Page) overview(r *http.Request) (view, error) {
	o, err := p.Control.Overview(r.Context())
	if err != nil {
		o.LastMinute = p.Control.History.LastMinute("")
	}
	data := overviewData{Overview: o, History: p.Control.History.Series(""), Lanes: map[string]history.Series{}, Sees: err == nil}
	for _, d := range o.Destinations {
		data.Lanes[d.Destination] = p.Control.History.Series(d.Destination)
	}
	return view{Template: "overview.html", Title: "Overview", Active: "overview", Live: true, Data: data}, err
}

type destinationData struct {
	control.Destination
	Advice   []ops.Advice
	Failures []ops.FailureGroup
	History  history.Series
	Name     string
}

func (p *Page) destination(r *http.Request) (view, error) {
	name := r.PathValue("name")
	d, advice, err := p.Control.Destination(r.Context(), name)
	if err != nil {
		return view{Active: "overview"}, err
	}
	failures, err := p.Control.Outbox.Failures(r.Context(), name)
	data := destinationData{Destination: d, Advice: advice, Failures: failures, History: p.Control.History.Series(name), Name: name}
	return view{Template: "destination.html", Title: name, Active: "overview", Live: true, Data: data}, err
}

// changeDestination does what a button of the destination's page says.
func (p *Page) changeDestination(r *http.Request, outbox *ops.Outbox) (to string, err error) {
	name := r.PathValue("name")
	var word string
	switch r.PathValue("action") {
	case "pause":
		done, pauseErr := outbox.Pause(r.Context(), name, r.PostForm.Get("reason"))
		if word, err = "was_paused", pauseErr; done.Changed {
			word = "paused"
		}
	case "resume":
		done, resumeErr := outbox.Resume(r.Context(), name, false)
		switch word, err = "was_resumed", resumeErr; {
		case done.Changed && done.Breaker != "closed":
			word = "resumed_held"
		case done.Changed:
			word = "resumed"
		}
	case "reset-breaker":
		done, resetErr := outbox.ResetBreaker(r.Context(), name)
		if word, err = "breaker_was", resetErr; done.BreakerReset {
			word = "breaker_reset"
		}
	default:
		return "", check.Problem{Path: "action", Text: "is not known"}
	}
	return "/destinations/" + url.PathEscape(name) + "?done=" + word, err
}

type eventsData struct {
	Filter url.Values
	List   []ops.Delivery
	// Untaken events are not routed yet, and not listed; 0 where the filter leaves out what is
	// pending.
	Untaken int64
	// Searched is how far back was looked without filling the page; nil: all was looked at, or the page is full.
	Searched *ops.Searched
	// Next is the query of the next page; empty: this is the last. First is that of the first one.
	Next, First  string
	Destinations []string
	Reasons      []policy.Reason
	// Narrowed reports whether a button may act on all that match: the filter says something, and not a reference, to which no index leads.
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
		Filter: q, Reasons: policy.Reasons(), same: same, Narrowed: len(same) > 0 && !same.Has("related"), First: query(same),
		Replays:  status == "" || status == "failed" || status == "delivered" || status == "discarded",
		Discards: status == "" || status == "failed" || status == "pending" || status == "parked",
	}
	v := view{Template: "events.html", Title: "Events", Active: "events", Live: q.Get("after") == ""}
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
	Alerts       []alert.Alert
	destinations []ops.DestinationStatus
}

// Known reports whether what an alert is about is a destination with a page.
func (d alertsData) Known(subject string) bool {
	return slices.ContainsFunc(d.destinations, func(one ops.DestinationStatus) bool { return one.Destination == subject })
}

func (p *Page) alerts(r *http.Request) (view, error) {
	s, err := p.Control.Status(r.Context())
	return view{Template: "alerts.html", Title: "Alerts", Active: "alerts", Live: true, Data: alertsData{s.Alerts, s.Destinations}}, err
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

type relaysData struct{ Relays []ops.RelayStatus }

func (p *Page) relays(r *http.Request) (view, error) {
	s, err := p.Control.Status(r.Context())
	return view{Template: "relays.html", Title: "Relays", Active: "relays", Live: true, Data: relaysData{s.Relays}}, err
}

type auditData struct {
	Entries []ops.AuditEntry
	Next    int64 // the parameter before of the next page; 0: this is the last
	First   bool
}

func (p *Page) audit(r *http.Request) (view, error) {
	v := view{Template: "audit.html", Title: "Audit", Active: "audit", Live: true, Data: auditData{}}
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
