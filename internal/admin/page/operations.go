package page

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

type previewData struct {
	words
	control.Preview
	// Order as JSON, for the form that confirms it.
	OrderJSON string
	Back      string
	// Asked is the query of a replay that may go out at another rate; nil: it is over at once.
	Asked url.Values
}

// preview counts what an order would change, and asks.
func (p *Page) preview(r *http.Request) (view, error) {
	v := view{Title: "Preview"}
	if !guard.CallerOf(r.Context()).MayChange {
		return v, control.ErrReadOnly
	}
	q := r.URL.Query()
	if q.Has("selected") && len(q["id"]) == 0 { // the filter alone would name more than the list shows
		return v, check.Problem{Path: "id", Text: "nothing is selected; tick what is meant"}
	}
	selection, err := p.Control.Selection(r.Context(), q)
	if err != nil {
		return v, err
	}
	preview, err := p.Control.Preview(r.Context(), ops.Order{Action: q.Get("action"), Selection: selection})
	if err != nil {
		return v, err
	}
	order, err := json.Marshal(preview.Order)
	if err != nil {
		return v, fmt.Errorf("encode order: %w", err)
	}
	var asked url.Values
	if preview.Found.Spread() != "" || q.Has("rate") {
		asked = maps.Clone(q)
		asked.Del("rate")
	}
	q.Del("action")
	q.Del("rate")
	q.Del("id")
	q.Del("selected")
	v.Template, v.Data = "preview.html", previewData{p.words(r), preview, string(order), "/events" + query(q), asked}
	return v, nil
}

// startOperation starts what a preview has confirmed.
func (p *Page) startOperation(r *http.Request, _ *ops.Outbox) (to string, err error) {
	var order ops.Order
	if err := json.Unmarshal([]byte(r.PostForm.Get("order")), &order); err != nil {
		return "", check.Problem{Path: "order", Text: "is damaged; go back and preview again"}
	}
	id, err := p.Control.Start(r.Context(), p.actor(r), order, r.PostForm.Get("token"))
	return fmt.Sprintf("/operations/%d", id), err
}

type operationData struct {
	ops.AuditEntry
	// Runs here: this process works on it and can interrupt it.
	RunsHere bool
	// Percent of what was counted that is done, and Left: the rest.
	Percent, Left int64
}

func (p *Page) operation(r *http.Request) (view, error) {
	v := view{Title: "Operation"}
	id, err := control.ParseID("id", r.PathValue("id"))
	if err != nil {
		return v, err
	}
	entry, err := p.Control.Outbox.AuditEntry(r.Context(), id)
	if err != nil {
		return v, err
	}
	data := operationData{AuditEntry: entry, RunsHere: p.Control.Runs(id), Left: max(entry.Matched-entry.Done, 0)}
	if entry.Matched > 0 {
		data.Percent = min(entry.Done*100/entry.Matched, 100)
	}
	if entry.State == "done" {
		data.Percent, data.Left = 100, 0
	}
	v.Template, v.Title, v.Data = "operation.html", fmt.Sprintf("Operation %d", id), data
	v.Live = entry.State == "running"
	return v, nil
}

func (p *Page) changeOperation(r *http.Request, _ *ops.Outbox) (to string, err error) {
	id, err := control.ParseID("id", r.PathValue("id"))
	if err != nil {
		return "", err
	}
	to = fmt.Sprintf("/operations/%d?done=", id)
	switch r.PathValue("action") {
	case "interrupt":
		return to + "interrupted", p.Control.Interrupt(r.Context(), p.actor(r), id)
	case "resume":
		return to + "continued", p.Control.Resume(r.Context(), p.actor(r), id)
	}
	return "", check.Problem{Path: "action", Text: "is not known"}
}
