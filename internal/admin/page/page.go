package page

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

//go:embed templates/*.html
var templateFiles embed.FS

//go:embed static
var staticFiles embed.FS

// Config is what the page shows beside what Control reads.
type Config struct {
	Control *control.Control
	// Prefix is the path below which the page lies, such as "/outbox"; empty: at the root.
	Prefix string
	// Relay is the name of this process, Version that of the program, and Database where it is,
	// without a password.
	Relay, Version, Database string
	// Home is the path of the index of several databases, and Of the name of this one there; empty:
	// there is one alone.
	Home, Of string
	// Targets are the URLs of destinations, without what may be secret.
	Targets func() map[string]string
	Log     zerolog.Logger
}

// An Entry is a database that the index lists.
type Entry struct {
	Name   string
	Served bool // a relay of this process is registered there
}

// A Page answers the routes of the dashboard.
type Page struct {
	Config
	templates map[string]*template.Template
	assets    map[string]asset
	kept      kept
}

// New returns the page. Handler serves it.
func New(cfg Config) (*Page, error) {
	p := &Page{Config: cfg, templates: map[string]*template.Template{}}
	static, err := fs.Sub(staticFiles, "static")
	if err != nil {
		return nil, fmt.Errorf("open static files: %w", err)
	}
	if p.assets, err = readAssets(static); err != nil {
		return nil, err
	}
	layout, err := template.New("layout.html").Funcs(p.functions()).ParseFS(templateFiles, "templates/layout.html", "templates/parts.html")
	if err != nil {
		return nil, fmt.Errorf("parse layout: %w", err)
	}
	names, err := fs.Glob(templateFiles, "templates/*.html")
	if err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	for _, name := range names {
		one, err := layout.Clone()
		if err == nil {
			one, err = one.ParseFS(templateFiles, name)
		}
		if err != nil {
			return nil, fmt.Errorf("parse %s: %w", name, err)
		}
		p.templates[name[len("templates/"):]] = one
	}
	return p, nil
}

// Handler returns the handler of the page, without its prefix.
func (p *Page) Handler() http.Handler {
	mux := http.NewServeMux()
	show := func(pattern string, handle func(*http.Request) (view, error)) {
		mux.HandleFunc("GET "+pattern, func(w http.ResponseWriter, r *http.Request) {
			v, err := handle(r)
			p.answer(w, r, v, err)
		})
	}
	show("/{$}", p.overview)
	show("/destinations/{name}", p.destination)
	show("/events", p.events)
	show("/events/{id}", p.event)
	mux.HandleFunc("GET /find", p.find)
	show("/operations/new", p.preview)
	show("/operations/{id}", p.operation)
	show("/alerts", p.alerts)
	show("/relays", p.relays)
	show("/audit", p.audit)
	mux.HandleFunc("GET /static/{file...}", p.static)
	mux.HandleFunc("POST /events/{id}/reveal", p.reveal)
	mux.HandleFunc("POST /destinations/{name}/{action}", p.change(p.changeDestination))
	mux.HandleFunc("POST /alerts/{action}", p.change(p.changeAlert))
	mux.HandleFunc("POST /operations", p.change(p.startOperation))
	mux.HandleFunc("POST /operations/{id}/{action}", p.change(p.changeOperation))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		p.Refuse(w, r, http.StatusNotFound, "There is nothing here", "The address may be mistyped.")
	})
	return mux
}

// Index returns the handler of the page that lists several databases; the page of each lies below
// databases/NAME. Control may be nil.
func (p *Page) Index(all func() []Entry) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		p.answer(w, r, view{Template: "databases.html", Title: "Databases", Live: true, Data: all()}, nil)
	})
	mux.HandleFunc("GET /static/{file...}", p.static)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		p.Refuse(w, r, http.StatusNotFound, "There is nothing here", "The address may be mistyped.")
	})
	return mux
}

// A view is one page.
type view struct {
	// Template that shows Data.
	Template string
	Title    string
	// Live pages ask for themselves again while they are looked at.
	Live bool
	Data any

	// The rest is filled in by answer.
	Problem *control.Problem
	// ReadAt is when Data was read, while the database is away; zero: now.
	ReadAt time.Time
	Caller guard.Caller
	Done   string
	URL    string
	// Active is the entry of the menu.
	Active string
	Config Config
}

// answer renders a view, or says why there is none. While the database is away, what was shown last
// at the address is shown below that, with its age.
func (p *Page) answer(w http.ResponseWriter, r *http.Request, v view, err error) {
	status := http.StatusOK
	if v.Problem != nil {
		status = v.Problem.Status
	}
	address := p.address(r)
	if err == nil && v.Problem == nil && v.Live {
		p.kept.keep(address, v, time.Now())
	}
	if err != nil {
		problem, unexpected := p.Control.Problem(r.Context(), err)
		if unexpected && !errors.Is(r.Context().Err(), context.Canceled) {
			p.Log.Warn().Err(err).Str("path", r.URL.Path).Msg("the page could not read the database")
		}
		status = problem.Status
		if last, at, known := p.kept.last(address); known && problem.Kind == control.KindDatabase && r.Method == http.MethodGet {
			v, v.ReadAt = last, at
		}
		v.Problem = &problem
		if v.Template == "" {
			v.Template, v.Title = "problem.html", problem.Title
		}
		v.Live = v.Live || problem.Status == http.StatusServiceUnavailable
	}
	p.render(w, r, status, v)
}

func (p *Page) render(w http.ResponseWriter, r *http.Request, status int, v view) {
	v.Caller, v.Config = guard.CallerOf(r.Context()), p.Config
	v.Active = section(strings.TrimPrefix(r.URL.Path, p.Prefix))
	v.Done = done(r.URL.Query().Get("done"))
	v.URL = p.address(r)
	var body bytes.Buffer
	if err := p.templates[v.Template].ExecuteTemplate(&body, "layout.html", v); err != nil {
		p.Log.Error().Err(err).Str("template", v.Template).Msg("the page could not be rendered")
		http.Error(w, "The page could not be rendered; the log of the relay says why.", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = body.WriteTo(w)
}

// address returns where a page asks for itself again: without what a form before it did.
func (p *Page) address(r *http.Request) string {
	q := r.URL.Query()
	q.Del("done")
	return p.Prefix + r.URL.EscapedPath() + query(q)
}

// section returns the entry of the menu that a path belongs to; empty: none.
func section(path string) string {
	first, rest, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	switch first {
	case "", "destinations":
		return "overview"
	case "find":
		return "events"
	case "operations":
		if rest == "new" {
			return "events"
		}
		return "audit"
	}
	return first
}

// Refuse answers a request that may not pass, as a page.
func (p *Page) Refuse(w http.ResponseWriter, r *http.Request, status int, title, detail string) {
	p.render(w, r, status, view{Template: "problem.html", Title: title, Problem: &control.Problem{Status: status, Title: title, Detail: detail}})
}

// change returns the handler of a form: it changes something and sends the browser on, so that a
// reload repeats nothing.
func (p *Page) change(change func(*http.Request, *ops.Outbox) (to string, err error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !guard.CallerOf(r.Context()).MayChange {
			p.answer(w, r, view{}, control.ErrReadOnly)
			return
		}
		if err := r.ParseForm(); err != nil {
			p.Refuse(w, r, http.StatusBadRequest, "The form cannot be read", "It is damaged, or larger than 1 MiB. Select by a filter instead of event by event.")
			return
		}
		to, err := change(r, p.outbox(r))
		p.Control.Forget()
		if err != nil {
			p.answer(w, r, view{}, err)
			return
		}
		p.redirect(w, r, to)
	}
}

// redirect sends the browser to another page of this site.
func (p *Page) redirect(w http.ResponseWriter, r *http.Request, to string) {
	http.Redirect(w, r, p.Prefix+to, http.StatusSeeOther) //nolint:gosec // G710: to begins with a path of this page
}

// outbox returns an Outbox that records who asks.
func (p *Page) outbox(r *http.Request) *ops.Outbox { return p.Control.Outbox.As(p.actor(r)) }

func (*Page) actor(r *http.Request) ops.Actor {
	return ops.Actor{Name: guard.CallerOf(r.Context()).Name, Origin: ops.OriginPage}
}

// done returns what a form did, for the page that follows. Only known words are shown: a link may
// hold any.
func done(word string) string {
	return map[string]string{
		"paused":        "Paused. Relays claim nothing for it until it is resumed; what is in flight is still sent.",
		"resumed":       "Resumed. Deliveries flow again.",
		"resumed_held":  "Resumed. It is still down and held until a probe succeeds.",
		"breaker_reset": "What is due is sent within five seconds, without a probe. Retry now tries what waits for its next attempt.",
		"acknowledged":  "Acknowledged. It is not sent again until it returns; its recovery is.",
		"silenced":      "Silent for two hours. What lasts longer is sent then.",
		"unsilenced":    "The silence has ended. What lasts is sent.",
		"interrupted":   "It ends after its present batch. What was changed stays changed.",
		"continued":     "It continues.",
	}[word]
}

// query returns parameters as a text for a link; nothing without any.
func query(q url.Values) string {
	if len(q) == 0 {
		return ""
	}
	return "?" + q.Encode()
}
