package api

import (
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// An API answers the routes below /api.
type API struct {
	control *control.Control
	version string
	log     zerolog.Logger
}

// New returns the handler of the API. version is that of the program.
func New(c *control.Control, version string, log zerolog.Logger) http.Handler {
	a := &API{control: c, version: version, log: log}
	mux := http.NewServeMux()
	for _, route := range a.routes() {
		mux.HandleFunc(route.Method+" "+route.Path, a.handler(route))
	}
	document := a.document()
	mux.HandleFunc("GET /api/openapi.json", func(w http.ResponseWriter, _ *http.Request) { write(w, http.StatusOK, document) })
	mux.HandleFunc("/api/", func(w http.ResponseWriter, r *http.Request) {
		if allowed := a.methods(r.URL.Path); len(allowed) > 0 {
			w.Header().Set("Allow", strings.Join(allowed, ", "))
			Refuse(w, r, http.StatusMethodNotAllowed, "This method is not allowed", "Use "+strings.Join(allowed, " or ")+".")
			return
		}
		Refuse(w, r, http.StatusNotFound, "There is nothing here", "GET /api/openapi.json lists what there is.")
	})
	return mux
}

// A route is one operation. Its request and answer are values of the types that the document
// describes.
type route struct {
	Method, Path, ID, Summary string
	// Query are the names of its parameters.
	Query []string
	// Request is a value of the type of its body; nil: it has none.
	Request any
	// Answer is a value of the type of its answer.
	Answer any
	// Changes: only an administrator may use it. Reveals: only one with a token.
	Changes, Reveals bool
	Status           int // of success
	handle           func(*http.Request) (any, error)
}

func (a *API) routes() []route {
	return []route{
		{Method: "GET", Path: "/api/v1/overview", ID: "getOverview", Summary: "What is wrong, the figures of the first page, and the destinations that GET /api/v1/destinations lists.", Query: control.ListNames(), Answer: control.Overview{}, handle: a.overview},
		{Method: "GET", Path: "/api/v1/history", ID: "getHistory", Summary: "What all relays did: span is 1h, 24h or 14d.", Query: []string{"destination", "span"}, Answer: historyAnswer{}, handle: a.history},
		{Method: "GET", Path: "/api/v1/destinations", ID: "listDestinations", Summary: "Destinations with their states: 100, or limit (1 to 500). If there are more, those in trouble come first; sort orders them by a column, and after is next of the page before.", Query: control.ListNames(), Answer: destinationList{}, handle: a.destinations},
		{Method: "GET", Path: "/api/v1/destinations/{name}", ID: "getDestination", Summary: "One destination, and what fails there by reason.", Answer: destinationAnswer{}, handle: a.destination},
		{Method: "POST", Path: "/api/v1/destinations/{name}/pause", ID: "pauseDestination", Summary: "Keep relays from claiming for a destination.", Request: pauseRequest{}, Answer: ops.Pause{}, Changes: true, handle: a.pause},
		{Method: "POST", Path: "/api/v1/destinations/{name}/resume", ID: "resumeDestination", Summary: "End a pause.", Answer: ops.Pause{}, Changes: true, handle: a.resume},
		{Method: "POST", Path: "/api/v1/destinations/{name}/reset-breaker", ID: "resetBreaker", Summary: "Close the breaker and send what is due, without a probe.", Answer: ops.Pause{}, Changes: true, handle: a.resetBreaker},
		{Method: "GET", Path: "/api/v1/events", ID: "listDeliveries", Summary: "Deliveries that match a filter, the newest first.", Query: control.FilterNames(), Answer: deliveryPage{}, handle: a.deliveries},
		{Method: "GET", Path: "/api/v1/events/{id}", ID: "getEvent", Summary: "One event: its deliveries, attempts, and why it waits. Never its payload.", Answer: ops.EventReport{}, handle: withID(a.event)},
		{Method: "POST", Path: "/api/v1/events/{id}/reveal", ID: "revealEvent", Summary: "One event with its payload. The audit records it.", Answer: ops.EventReport{}, Changes: true, Reveals: true, handle: withID(a.reveal)},
		{Method: "POST", Path: "/api/v1/previews", ID: "previewOperation", Summary: "Count what a replay, a retry or a discard would change, and get the token that confirms it.", Request: orderRequest{}, Answer: control.Preview{}, Changes: true, handle: a.preview},
		{Method: "POST", Path: "/api/v1/operations", ID: "startOperation", Summary: "Start a replay, a retry or a discard that a preview has confirmed.", Request: confirmedRequest{}, Answer: ops.AuditEntry{}, Changes: true, Status: http.StatusAccepted, handle: a.start},
		{Method: "GET", Path: "/api/v1/operations/{id}", ID: "getOperation", Summary: "How far an operation is.", Answer: ops.AuditEntry{}, handle: withID(a.operation)},
		{Method: "POST", Path: "/api/v1/operations/{id}/interrupt", ID: "interruptOperation", Summary: "End an operation of this relay after its present batch.", Answer: ops.AuditEntry{}, Changes: true, handle: withID(a.changed(a.control.Interrupt))},
		{Method: "POST", Path: "/api/v1/operations/{id}/resume", ID: "resumeOperation", Summary: "Go on with an operation that was interrupted or killed.", Answer: ops.AuditEntry{}, Changes: true, Status: http.StatusAccepted, handle: withID(a.changed(a.control.Resume))},
		{Method: "GET", Path: "/api/v1/alerts", ID: "listAlerts", Summary: "The open alerts: 100, or limit (1 to 500), the oldest first, and how many follow.", Query: []string{"skip", "limit"}, Answer: alertList{}, handle: a.alerts},
		{Method: "POST", Path: "/api/v1/alerts/acknowledge", ID: "acknowledgeAlert", Summary: "Say that an open alert is known: it is not repeated until it returns.", Request: acknowledgeRequest{}, Answer: alertList{}, Changes: true, handle: a.acknowledge},
		{Method: "POST", Path: "/api/v1/alerts/silence", ID: "silenceAlerts", Summary: "Send nothing of some alerts for a while; 0 seconds ends it. An empty rule or subject stands for all.", Request: silenceRequest{}, Answer: alertList{}, Changes: true, handle: a.silence},
		{Method: "GET", Path: "/api/v1/relays", ID: "listRelays", Summary: "The registered relays, each with 100 of its destinations, or limit (1 to 500), and how many are left.", Query: []string{"limit"}, Answer: relayList{}, handle: a.relays},
		{Method: "GET", Path: "/api/v1/audit", ID: "listAudit", Summary: "What operators did, the newest first.", Query: []string{"before", "limit"}, Answer: auditPage{}, handle: a.audit},
	}
}

// handler checks the role, answers, and turns errors into problems.
func (a *API) handler(route route) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var answer any
		var err error
		switch caller := guard.CallerOf(r.Context()); {
		case route.Reveals && !caller.MayReveal:
			err = control.ErrNoPayloads
		case route.Changes && !caller.MayChange:
			err = control.ErrReadOnly
		default:
			err = checkQuery(r, route.Query)
		}
		if err == nil {
			answer, err = route.handle(r)
		}
		if err != nil {
			p, unexpected := a.control.Problem(r.Context(), err)
			if unexpected {
				a.log.Error().Err(err).Str("operation", route.ID).Msg("the API could not answer")
			}
			writeProblem(w, p)
			return
		}
		write(w, max(route.Status, http.StatusOK), answer)
	}
}

// methods returns those of the routes at a path.
func (a *API) methods(path string) (all []string) {
	for _, route := range a.routes() {
		probe := http.NewServeMux()
		probe.HandleFunc(route.Path, func(http.ResponseWriter, *http.Request) {})
		if _, pattern := probe.Handler(&http.Request{Method: route.Method, URL: &url.URL{Path: path}}); pattern != "" {
			all = append(all, route.Method)
		}
	}
	return all
}

// Refuse answers a request that may not pass, as application/problem+json.
func Refuse(w http.ResponseWriter, _ *http.Request, status int, title, detail string) {
	kind := strings.ReplaceAll(strings.ToLower(http.StatusText(status)), " ", "-")
	writeProblem(w, control.Problem{Status: status, Kind: kind, Title: title, Detail: detail})
}

// problemBody is RFC 9457.
type problemBody struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
}

func writeProblem(w http.ResponseWriter, p control.Problem) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(problemBody{"https://outbox-relay.dev/problems/" + p.Kind, p.Title, p.Status, p.Detail})
}

func write(w http.ResponseWriter, status int, answer any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(answer)
}

// read decodes a body. A field that is not known is an error: a misspelt condition would widen a
// selection.
func read[T any](r *http.Request) (request T, err error) {
	if kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); strings.TrimSpace(kind) != "application/json" {
		return request, check.Problem{Path: "Content-Type", Text: "is not application/json"}
	}
	decoder := json.NewDecoder(r.Body)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&request); err != nil {
		if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
			return request, check.Problem{Path: "body", Text: "is larger than 1 MiB; select by a filter instead of by ids"}
		}
		return request, check.Problem{Path: "body", Text: "is not the JSON that /api/openapi.json describes: " + err.Error()}
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return request, check.Problem{Path: "body", Text: "is followed by more than blanks"}
	}
	return request, nil
}

// checkQuery refuses a parameter that the route does not have, or that stands there twice: a
// misspelt condition would widen a list.
func checkQuery(r *http.Request, known []string) error {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return check.Problem{Path: "query", Text: "cannot be read: " + err.Error()}
	}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		switch {
		case !slices.Contains(known, name):
			hint := settings.DidYouMean(name, known)
			if hint == "" && len(known) > 0 {
				hint = "; there are " + strings.Join(known, ", ")
			}
			return check.Problem{Path: plain.Clip(name), Text: "is not a parameter of this request" + hint}
		case len(query[name]) > 1:
			return check.Problem{Path: plain.Clip(name), Text: "is given more than once"}
		}
	}
	return nil
}

// withID reads the id of a path.
func withID(handle func(*http.Request, int64) (any, error)) func(*http.Request) (any, error) {
	return func(r *http.Request) (any, error) {
		id, err := control.ParseID("id", r.PathValue("id"))
		if err != nil {
			return nil, err
		}
		return handle(r, id)
	}
}
