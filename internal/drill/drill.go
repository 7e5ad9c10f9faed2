package drill

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A Config says which receiver is tried, and how. What has no zero value below is required.
type Config struct {
	URL    *url.URL
	Dialer *net.Dialer // opens the connections to it
	TLS    *tls.Config // of an https URL; nil: the system's authorities
	Header http.Header // sent with every request beside the contract's own; nil: none
	// Secrets that the receiver accepts. A relay signs with all of them, and so does the drill.
	Secrets []webhook.Secret
	// Retired secrets must be refused. Empty: the check is skipped.
	Retired []webhook.Secret
	// Probe counts effects. nil: checks are judged by the answers alone, and those that only
	// effects can decide are skipped.
	Probe Probe
	// StagingWord in the host's name marks a receiver for tests, beside the usual ones. Empty: the
	// usual ones alone.
	StagingWord string
	Destination string // the relay's name for the receiver, in X-Outbox-Destination
	Type        string // of the events
	Version     int
	Payload     string        // in which {key} stands for the idempotency key
	Timeout     time.Duration // the relay's for one request
	Tolerance   time.Duration // the receiver's for timestamps
	Settle      time.Duration // how long an effect may take after the answer
	Patience    time.Duration // how long the receiver may wait for a request that does not continue
	MaxBody     int           // the largest body that the receiver must take, in bytes
	Rate        int           // of the load, events a second
	For         time.Duration // of the load
	// Only and Skip choose checks by name. The first one is always made. Empty: all; none.
	Only, Skip []string
	Done       func(Result) // called after each check, in turn
}

// A Check is one thing that a receiver must do right.
type Check struct {
	Name    string `json:"name"`
	Sends   string `json:"sends"`
	Expects string `json:"expects"`
	Remedy  string `json:"remedy"` // what the receiver's author does if it fails
	Link    string `json:"link"`   // where that is explained

	kind kind
	run  func(*trial)
}

// A kind says when a check is made.
type kind int

const (
	usual      kind = iota
	needsProbe      // answers alone decide nothing
	beside          // it waits most of the time: beside the others
)

// Outcomes of a check.
const (
	Passed  = "passed"
	Failed  = "failed"
	Warned  = "warned" // it should be fixed, and costs no event
	Skipped = "skipped"
)

// A Result is what came of one check.
type Result struct {
	Check
	Outcome string  `json:"outcome"`
	Found   string  `json:"found,omitempty"` // what is wrong, or why the check was skipped
	Seconds float64 `json:"seconds"`
}

// A Report is what came of all checks.
type Report struct {
	URL       string   `json:"url"`
	KeyPrefix string   `json:"key_prefix"` // of all events that were sent
	Probed    bool     `json:"probed"`
	Requests  int64    `json:"requests"`
	Seconds   float64  `json:"seconds"`
	Checks    []Result `json:"checks"`
}

// Count returns how many checks ended in an outcome.
func (r Report) Count(outcome string) (n int) {
	for _, result := range r.Checks {
		if result.Outcome == outcome {
			n++
		}
	}
	return n
}

// A drill is one run.
type drill struct {
	Config
	prefix   string
	http     *http.Transport
	ids      atomic.Int64
	requests atomic.Int64
	first    event // that was accepted

	mu     sync.Mutex // guards audits
	audits []audit
}

// A trial is one check while it is made. It ends with a verdict, by a panic, or has found nothing.
type trial struct {
	*drill
	ctx   context.Context //nolint:containedctx // that of the run, for the time of one call
	check string
	which string // of several events, for people
}

// A verdict is what a check has found out.
type verdict struct{ outcome, found string }

func (t *trial) end(outcome, format string, args ...any) {
	found := fmt.Sprintf(format, args...)
	if t.which != "" {
		found += ", " + t.which
	}
	panic(verdict{outcome, found})
}

func (t *trial) fault(format string, args ...any)  { t.end(Failed, format, args...) }
func (t *trial) advise(format string, args ...any) { t.end(Warned, format, args...) }
func (t *trial) skip(why string)                   { t.end(Skipped, "%s", why) }

// try makes a check, unless there is a reason to skip it.
func (d *drill) try(ctx context.Context, r *Result, skip string) {
	began := time.Now()
	defer func() {
		r.Seconds, r.Outcome = time.Since(began).Seconds(), Passed
		if v := recover(); v != nil {
			end, ok := v.(verdict)
			if !ok {
				panic(v)
			}
			r.Outcome, r.Found = end.outcome, end.found
		}
	}()
	t := &trial{drill: d, ctx: ctx, check: r.Name}
	if skip != "" {
		t.skip(skip)
	}
	r.run(t)
}

// Run makes the checks and reports what they found. An error means that there is no report: the
// receiver did not agree, the probe cannot be used, or ctx has ended.
func Run(ctx context.Context, cfg Config) (Report, error) {
	d := &drill{Config: cfg, prefix: "drill-" + strings.ToLower(rand.Text()[:10])}
	d.ids.Store(time.Now().UnixMicro())
	d.http = &http.Transport{DialContext: cfg.Dialer.DialContext, TLSClientConfig: cfg.TLS, DisableCompression: true, MaxIdleConnsPerHost: maxInFlight, IdleConnTimeout: time.Second}
	defer d.http.CloseIdleConnections()
	for _, name := range slices.Concat(cfg.Only, cfg.Skip) {
		if !slices.ContainsFunc(table[:], func(c Check) bool { return c.Name == name }) {
			return Report{}, fmt.Errorf("%w %q; docs/drill.md lists them", ErrUnknownCheck, name)
		}
	}
	if err := d.askConsent(ctx); err != nil {
		return Report{}, err
	}
	if d.Probe != nil {
		if n, err := d.Probe(ctx, d.prefix+"-never-sent"); err != nil {
			return Report{}, err
		} else if n != 0 {
			return Report{}, fmt.Errorf("the probe counts %d effects of a key that was never sent; it must count those of the key that it is given", n)
		}
	}
	began := time.Now()
	results := d.checkAll(ctx)
	if err := context.Cause(ctx); err != nil {
		return Report{}, err
	}
	shown := url.URL{Scheme: cfg.URL.Scheme, Host: cfg.URL.Host, Path: cfg.URL.Path} // a query may hold a token
	return Report{shown.String(), d.prefix, cfg.Probe != nil, d.requests.Load(), time.Since(began).Seconds(), results}, nil
}

// checkAll makes the checks in the order of the table. Those that wait most of the time are made
// beside the others.
func (d *drill) checkAll(ctx context.Context) []Result {
	results := make([]Result, len(table))
	var waiting sync.WaitGroup
	for i := range results {
		r := &results[i]
		r.Check = table[i]
		if skip := d.reason(results, i); skip == "" && r.kind == beside {
			waiting.Go(func() { d.try(ctx, r, "") })
		} else if d.try(ctx, r, skip); skip != NotAsked {
			d.Done(*r)
		}
	}
	waiting.Wait()
	d.audit(ctx, results)
	for _, r := range results {
		if r.kind == beside && r.Outcome != Skipped {
			d.Done(r)
		}
	}
	return results
}

// NotAsked is what [Result.Found] says of a check that Only or Skip leaves out.
const NotAsked = "it was not asked for"

// reason returns why a check is not made; empty: it is.
func (d *drill) reason(results []Result, i int) string {
	r := &results[i]
	switch {
	case i > 0 && (len(d.Only) > 0 && !slices.Contains(d.Only, r.Name) || slices.Contains(d.Skip, r.Name)):
		return NotAsked
	case results[0].Outcome == Failed:
		return "the receiver does not do right with the first event"
	case r.kind == needsProbe && d.Probe == nil:
		return "only effects show it, and no probe is given"
	}
	return ""
}

// Checks returns the table.
func Checks() []Check { return slices.Clone(table[:]) }

// ErrProduction says that nothing marks the receiver as one for tests.
var ErrProduction = errors.New("nothing says that this is a receiver for tests, and a drill leaves events and effects behind")

// ErrUnknownCheck says that Only or Skip names a check that is not in the table.
var ErrUnknownCheck = errors.New("there is no check")

// Consent is the header with which a receiver answers that drills are allowed, whatever its host is
// called.
const (
	Consent        = "X-Outbox-Drill"
	ConsentAllowed = "allowed"
)

// askConsent fails unless the receiver is one for tests, by its host's name or by its answer to a
// request that asks for nothing. It has neither key nor signature nor credentials: a receiver that
// does not look at the method would take it for an event.
func (d *drill) askConsent(ctx context.Context) error {
	if isStaging(d.URL.Hostname(), d.StagingWord) {
		return nil
	}
	switch a := d.exchange(ctx, http.MethodOptions, http.Header{}, nil, d.Timeout); {
	case a.err != nil:
		return fmt.Errorf("ask the receiver whether a drill is allowed: %w", a.err)
	case a.header.Get(Consent) != ConsentAllowed:
		return fmt.Errorf("%w: let the receiver answer OPTIONS with the header %s: %s, or name the word in its host that says so with --staging", ErrProduction, Consent, ConsentAllowed)
	}
	return nil
}

// stagingWords are parts of a host's name that no receiver in production has.
var stagingWords = [...]string{"staging", "stage", "stg", "test", "testing", "localhost", "sandbox", "dev", "qa", "uat", "preview"}

// isStaging reports whether a host is one for tests: it is this machine, or its name says so, or
// has the given word. A registered domain and its top level say nothing by themselves: test.de and
// example.dev are in production. Under a top level of two letters a registered domain may have
// three labels: stage.co.uk is in production too.
func isStaging(host, word string) bool {
	if address := net.ParseIP(host); address != nil {
		return address.IsLoopback()
	}
	has := func(label string, words ...string) bool {
		return slices.ContainsFunc(strings.Split(label, "-"), func(part string) bool { return slices.Contains(words, strings.TrimRight(part, "0123456789")) })
	}
	labels := strings.Split(strings.ToLower(strings.TrimSuffix(host, ".")), ".")
	registered := 2 // labels
	if len(labels[len(labels)-1]) == 2 {
		registered = 3
	}
	for i, label := range labels {
		last := i == len(labels)-1
		if word != "" && has(label, strings.ToLower(word)) || has(label, stagingWords[:]...) && (i < len(labels)-registered || last && (i == 0 || label != "dev")) {
			return true
		}
	}
	return false
}
