package page

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

type eventData struct {
	words
	ID int64
	ops.EventReport
	Timeline []moment
	Requests []request
	// Revealed: Event has its payload.
	Revealed bool
}

// MayRetry reports whether a delivery waits for its next attempt.
func (d eventData) MayRetry() bool {
	return slices.ContainsFunc(d.Deliveries, func(one ops.Delivery) bool {
		return slices.ContainsFunc(d.Waits, func(w ops.Wait) bool { return endsWithRetry(one, w) })
	})
}

// endsWithRetry reports whether a delivery waits for a reason that a retry ends.
func endsWithRetry(d ops.Delivery, w ops.Wait) bool {
	return w.Destination == d.Destination && w.Cause == "not_due" && d.Attempts > 0
}

// again returns the command by which the relay sends a delivery once more. Where a retry changes
// nothing, comments say what the delivery waits for.
func (d eventData) again(one ops.Delivery) (lines []string) {
	if one.Status != "pending" {
		return []string{fmt.Sprintf("outbox-relay replay %d --status failed,delivered,discarded --destination %s", d.ID, plain.ShellWord(one.Destination))}
	}
	for _, w := range d.Waits {
		switch {
		case endsWithRetry(one, w):
			lines = append(lines, fmt.Sprintf("outbox-relay retry %d --destination %s", d.ID, plain.ShellWord(one.Destination)))
		case w.Destination == one.Destination:
			lines = append(lines, "# It waits: "+plain.Line(w.Text))
		}
	}
	return lines
}

// A moment is one line of the timeline.
type moment struct {
	At time.Time
	// Kind is created, attempt, delivered, failed, discarded or waiting: how it looks.
	Kind, Destination, Title, Detail string
	// Gap is how long nothing happened before it, or what is left out; empty: hardly any time.
	Gap string
	// like is equal for attempts with the same number and end.
	like string
}

// A request shows how an operator would send an event by hand.
type request struct{ Destination, Curl string }

func (p *Page) event(r *http.Request) (view, error) {
	data, err := p.readEvent(r, func(ctx context.Context, id int64) (ops.EventReport, error) {
		return p.Control.Outbox.Event(ctx, id)
	})
	return viewOfEvent(data, true, err)
}

// find leads from what is known of an event (its id, idempotency key or related reference) to its
// page, as events show does, or to the list of the events that have the reference.
func (p *Page) find(w http.ResponseWriter, r *http.Request) {
	text := strings.TrimSpace(r.URL.Query().Get("q"))
	if text == "" {
		p.redirect(w, r, "/events")
		return
	}
	if strings.ContainsRune(text, 0) {
		p.answer(w, r, view{}, check.Problem{Path: "q", Text: "contains a NUL"})
		return
	}
	ids, err := p.Control.Outbox.FindEvents(r.Context(), text)
	if errors.As(err, new(ops.UnknownEvent)) {
		text = strings.TrimSuffix(text, "*")
		if begun, prefixErr := p.Control.Outbox.EventsOfPrefix(r.Context(), text, 2); prefixErr == nil && len(begun) > 0 {
			p.redirect(w, r, "/events"+query(url.Values{"key": {text + "*"}}))
			return
		}
	}
	switch {
	case errors.As(err, new(ops.UnknownEvent)):
		problem, _ := control.ProblemOf(err)
		p.answer(w, r, view{Template: "find.html", Title: "Find an event", Data: query(url.Values{"related": {text}}), Problem: &problem}, nil)
	case err != nil:
		p.answer(w, r, view{}, err)
	case len(ids) > 1:
		p.redirect(w, r, "/events"+query(url.Values{"related": {text}}))
	default:
		p.redirect(w, r, fmt.Sprintf("/events/%d", ids[0]))
	}
}

// viewOfEvent shows an event; without one, the problem alone.
func viewOfEvent(data eventData, live bool, err error) (view, error) {
	v := view{Title: fmt.Sprintf("Event %d", data.ID), Live: live, Data: data}
	if err == nil {
		v.Template = "event.html"
	}
	return v, err
}

// reveal shows an event with its payload. It is no redirect, so that the payload stands behind no
// address.
func (p *Page) reveal(w http.ResponseWriter, r *http.Request) {
	if !guard.CallerOf(r.Context()).MayReveal {
		p.answer(w, r, view{}, control.ErrNoPayloads)
		return
	}
	data, err := p.readEvent(r, p.outbox(r).Reveal)
	data.Revealed = err == nil
	v, err := viewOfEvent(data, false, err)
	p.answer(w, r, v, err)
}

func (p *Page) readEvent(r *http.Request, read func(context.Context, int64) (ops.EventReport, error)) (data eventData, err error) {
	if data.ID, err = control.ParseID("id", r.PathValue("id")); err != nil {
		return data, err
	}
	if data.EventReport, err = read(r.Context(), data.ID); err != nil {
		return data, err
	}
	data.words = p.words(r)
	data.Timeline = timeline(data.EventReport)
	for _, d := range data.Deliveries {
		if d.Destination != "" && data.Event.Type != "" {
			data.Requests = append(data.Requests, request{d.Destination, p.curl(data.Event, d, data.again(d))})
		}
	}
	return data, nil
}

// timeline puts what happened to an event in order.
func timeline(report ops.EventReport) (all []moment) {
	event := report.Event
	add := func(at time.Time, kind, destination, title, detail string) {
		all = append(all, moment{At: at, Kind: kind, Destination: destination, Title: title, Detail: detail})
	}
	if event.Type != "" {
		add(event.CreatedAt, "created", "", "Inserted by its producer", "When its transaction began; when that committed is not recorded.")
		if event.AvailableAt.After(event.CreatedAt.Add(time.Second)) {
			add(event.AvailableAt, "created", "", "Became available", "As its producer asked.")
		}
	}
	for _, a := range report.Attempts {
		answer := "no answer"
		if a.HTTPStatus != nil {
			answer = fmt.Sprint(*a.HTTPStatus)
		}
		title := fmt.Sprintf("Attempt %d: %s, %s", a.Attempt, answer, strings.ReplaceAll(string(a.Reason), "_", " "))
		add(a.StartedAt, "attempt", a.Destination, title, fmt.Sprintf("%s · took %d ms · relay %d", cmp.Or(text(a.Error), "no text"), a.DurationMS, a.RelayID))
		all[len(all)-1].like = a.Destination + "\x00" + title + "\x00" + text(a.Error)
	}
	for _, m := range report.Explain().History {
		switch m.What {
		case "replayed":
			add(m.At, "created", m.Destination, "Replayed", m.Text)
		case "delivered":
			add(m.At, "delivered", m.Destination, "Delivered", strings.TrimPrefix(m.Text, "delivered "))
		case "failed":
			add(m.At, "failed", m.Destination, "Failed", strings.TrimPrefix(m.Text, "failed "))
		case "discarded":
			add(m.At, "discarded", m.Destination, "Discarded", m.Text)
		case "archived":
			add(m.At, "created", "", "Archived", "")
		}
	}
	slices.SortStableFunc(all, func(a, b moment) int { return a.At.Compare(b.At) })
	for i := 1; i < len(all); i++ {
		if gap := all[i].At.Sub(all[i-1].At); gap >= time.Second {
			all[i].Gap = plain.Span(gap)
		}
	}
	return withoutMiddles(all)
}

// withoutMiddles leaves the first and the last of many attempts that are alike: a held delivery is
// probed for hours.
func withoutMiddles(all []moment) (short []moment) {
	const alike = 3 // as many in the middle are shown
	for i := 0; i < len(all); i++ {
		last := i
		for all[i].like != "" && last+1 < len(all) && all[last+1].like == all[i].like {
			last++
		}
		short = append(short, all[i])
		if more := last - i - 1; more >= alike {
			all[last].Gap = fmt.Sprintf("%d more like it within %s", more, plain.Span(all[last].At.Sub(all[i].At)))
			short = append(short, all[last])
			i = last
		}
	}
	return short
}

// curl writes a request as commands of a shell. The relay's own sign it. Those with curl are for a
// receiver that checks no signature; the payload is read from the database, as shells keep a
// history.
func (p *Page) curl(e ops.Event, d ops.Delivery, again []string) string {
	to := p.target(d.Destination)
	lines := slices.Concat([]string{"# By the relay, signed:"}, again, []string{"", "# With curl, for a receiver that checks no signature:"})
	if to == "" || strings.Contains(to, settings.Mask) {
		lines = append(lines, "URL="+quoted(cmp.Or(to, "https://…"))+"    # write what is masked")
		to = `"$URL"`
	} else {
		to = quoted(to)
	}
	command := []string{fmt.Sprintf("outbox-relay events show %d --payload --json | jq -rj .event.payload |\n  curl -X POST %s", e.ID, to)}
	header := func(name, value string) { command = append(command, "-H "+quoted(name+": "+value)) }
	header("Content-Type", "application/json")
	header(webhook.IdempotencyKey, e.IdempotencyKey)
	header(webhook.EventType, e.Type)
	header(webhook.EventVersion, strconv.Itoa(e.Version))
	header(webhook.EventID, strconv.FormatInt(e.ID, 10))
	header(webhook.CreatedAt, e.CreatedAt.UTC().Format("2006-01-02T15:04:05.000000Z"))
	if e.OrderingKey != nil {
		header(webhook.OrderingKey, *e.OrderingKey)
	}
	if e.RelatedReference != nil {
		header(webhook.RelatedReference, *e.RelatedReference)
	}
	command = append(command, "--data-binary @-")
	return strings.Join(append(lines, strings.Join(command, " \\\n  ")), "\n")
}

// quoted writes a text as one word of a shell.
func quoted(text string) string { return "'" + strings.ReplaceAll(plain.Line(text), "'", `'\''`) + "'" }
