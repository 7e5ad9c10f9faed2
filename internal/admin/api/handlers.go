package api

import (
	"context"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// The bodies of requests and answers that no other package has. Fields are added, never renamed or
// removed.
type (
	historyAnswer   struct{ history.Past }
	destinationList struct {
		Destinations []control.Destination `json:"destinations"`
		ops.Listed
	}
	destinationAnswer struct {
		control.Destination
		Advice   []ops.Advice       `json:"advice"`
		Failures []ops.FailureGroup `json:"failures"`
	}
	pauseRequest struct {
		Reason string `json:"reason"`
	}
	deliveryPage struct {
		Deliveries []ops.Delivery `json:"deliveries"`
		// Next is the parameter after of the next page; empty: this is the last.
		Next string `json:"next"`
		// SearchedTo is how far back was looked, if that ended before the page was full; nil: all
		// was looked at, or the page is full.
		SearchedTo *searchedAnswer `json:"searched_to"`
	}
	searchedAnswer struct {
		EventID   int64      `json:"event_id,string"`
		CreatedAt *time.Time `json:"created_at"`
	}
	orderRequest struct {
		Action    string        `json:"action"`
		Selection ops.Selection `json:"selection"`
	}
	confirmedRequest struct {
		orderRequest
		// Matched and Token are those of the preview.
		Matched int64  `json:"matched"`
		Token   string `json:"token"`
	}
	alertList struct {
		Alerts []alertAnswer `json:"alerts"`
		// AlertsLeft counts the open alerts that follow these.
		AlertsLeft int           `json:"alerts_left"`
		Silences   []ops.Silence `json:"silences"`
		// Ended are the alerts that ended last, within two weeks.
		Ended []alert.Past `json:"ended"`
	}
	acknowledgeRequest struct {
		Rule    string `json:"rule"`
		Subject string `json:"subject"`
	}
	silenceRequest struct {
		Rule    string `json:"rule"`
		Subject string `json:"subject"`
		Seconds int    `json:"seconds"`
		Reason  string `json:"reason"`
	}
	relayList struct {
		Relays []ops.RelayStatus `json:"relays"`
	}
	auditPage struct {
		Entries []ops.AuditEntry `json:"entries"`
	}
	alertAnswer struct{ alert.Alert }
)

func (a *API) actor(r *http.Request) ops.Actor {
	return ops.Actor{Name: guard.CallerOf(r.Context()).Name, Origin: ops.OriginAPI}
}

func (a *API) outbox(r *http.Request) *ops.Outbox { return a.control.Outbox.As(a.actor(r)) }

func (a *API) overview(r *http.Request) (any, error) {
	list, err := control.ParseList(r.URL.Query())
	if err != nil {
		return nil, err
	}
	o, err := a.control.Overview(r.Context(), list)
	return o.Bounded(), err
}

func (a *API) history(r *http.Request) (any, error) {
	q := r.URL.Query()
	if name := q.Get("span"); name != "" && history.SpanOf(name).Name != name {
		return nil, check.Problem{Path: "span", Text: "is not known; write 1h, 24h or 14d"}
	}
	past, err := a.control.Past(r.Context(), q.Get("destination"), history.SpanOf(q.Get("span")))
	return historyAnswer{past}, err
}

func (a *API) destinations(r *http.Request) (any, error) {
	list, err := control.ParseList(r.URL.Query())
	if err != nil {
		return nil, err
	}
	o, err := a.control.Overview(r.Context(), list)
	return destinationList{o.Destinations, o.Listed}, err
}

func (a *API) destination(r *http.Request) (any, error) {
	d, advice, err := a.control.Destination(r.Context(), r.PathValue("name"))
	if err != nil {
		return nil, err
	}
	failures, err := a.control.Outbox.Failures(r.Context(), d.DestinationStatus.Destination)
	return destinationAnswer{d, advice, failures}, err
}

func (a *API) pause(r *http.Request) (any, error) {
	request, err := read[pauseRequest](r)
	if err != nil {
		return nil, err
	}
	defer a.control.Forget()
	return a.outbox(r).Pause(r.Context(), r.PathValue("name"), request.Reason)
}

func (a *API) resume(r *http.Request) (any, error) {
	defer a.control.Forget()
	return a.outbox(r).Resume(r.Context(), r.PathValue("name"), false)
}

func (a *API) resetBreaker(r *http.Request) (any, error) {
	defer a.control.Forget()
	return a.outbox(r).ResetBreaker(r.Context(), r.PathValue("name"))
}

func (a *API) deliveries(r *http.Request) (any, error) {
	filter, err := a.control.Filter(r.Context(), r.URL.Query())
	if err != nil {
		return nil, err
	}
	list, err := a.control.Deliveries(r.Context(), filter)
	page := deliveryPage{Deliveries: list.Deliveries}
	if list.Next != nil {
		page.Next = list.Next.String()
	}
	if list.Searched != nil {
		page.SearchedTo = &searchedAnswer{list.Searched.EventID, list.Searched.CreatedAt}
	}
	return page, err
}

func (a *API) event(r *http.Request, id int64) (any, error) {
	return a.control.Outbox.Event(r.Context(), id)
}

func (a *API) reveal(r *http.Request, id int64) (any, error) {
	return a.outbox(r).Reveal(r.Context(), id)
}

func (a *API) preview(r *http.Request) (any, error) {
	request, err := read[orderRequest](r)
	if err != nil {
		return nil, err
	}
	return a.control.Preview(r.Context(), ops.Order{Action: request.Action, Selection: request.Selection})
}

func (a *API) start(r *http.Request) (any, error) {
	request, err := read[confirmedRequest](r)
	if err != nil {
		return nil, err
	}
	order := ops.Order{Action: request.Action, Selection: request.Selection, Matched: request.Matched}
	id, err := a.control.Start(r.Context(), a.actor(r), order, request.Token)
	if err != nil {
		return nil, err
	}
	return a.control.Outbox.AuditEntry(r.Context(), id)
}

func (a *API) operation(r *http.Request, id int64) (any, error) {
	return a.control.Outbox.AuditEntry(r.Context(), id)
}

// changed changes an operation and answers with what has become of it.
func (a *API) changed(change func(context.Context, ops.Actor, int64) error) func(*http.Request, int64) (any, error) {
	return func(r *http.Request, id int64) (any, error) {
		if err := change(r.Context(), a.actor(r), id); err != nil {
			return nil, err
		}
		return a.operation(r, id)
	}
}

func (a *API) alerts(r *http.Request) (any, error) {
	s, err := a.control.Status(r.Context())
	if err != nil {
		return nil, err
	}
	skip, limit, err := control.ParseRange(r.URL.Query())
	if err != nil {
		return nil, err
	}
	list := alertList{Alerts: []alertAnswer{}, Silences: []ops.Silence{}}
	open, left := ops.Bound(s.Alerts[min(skip, len(s.Alerts)):], limit)
	list.AlertsLeft = left
	for _, one := range open {
		list.Alerts = append(list.Alerts, alertAnswer{one})
	}
	silences, err := a.control.Outbox.Silences(r.Context())
	list.Silences = append(list.Silences, silences...)
	if err == nil {
		list.Ended, err = alert.Ended(r.Context(), a.control.Outbox.DB())
	}
	return list, err
}

func (a *API) acknowledge(r *http.Request) (any, error) {
	request, err := read[acknowledgeRequest](r)
	if err == nil {
		err = a.outbox(r).AcknowledgeAlert(r.Context(), request.Rule, request.Subject)
	}
	return a.alertsAfter(r, err)
}

func (a *API) silence(r *http.Request) (any, error) {
	request, err := read[silenceRequest](r)
	if err == nil {
		err = a.outbox(r).SilenceAlerts(r.Context(), request.Rule, request.Subject, time.Duration(request.Seconds)*time.Second, request.Reason)
	}
	return a.alertsAfter(r, err)
}

// alertsAfter answers a change with what has become of the alerts.
func (a *API) alertsAfter(r *http.Request, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	a.control.Forget()
	return a.alerts(r)
}

func (a *API) relays(r *http.Request) (any, error) {
	_, limit, err := control.ParseRange(r.URL.Query())
	if err != nil {
		return nil, err
	}
	s, err := a.control.Status(r.Context())
	list := relayList{Relays: []ops.RelayStatus{}}
	for _, one := range s.Relays {
		list.Relays = append(list.Relays, one.Bounded(limit))
	}
	return list, err
}

func (a *API) audit(r *http.Request) (any, error) {
	q := r.URL.Query()
	limit, err := control.ParseLimit(q)
	if err != nil {
		return nil, err
	}
	before := int64(0)
	if text := q.Get("before"); text != "" {
		if before, err = control.ParseID("before", text); err != nil {
			return nil, err
		}
	}
	entries, err := a.control.Outbox.Audit(r.Context(), before, limit)
	return auditPage{entries}, err
}
