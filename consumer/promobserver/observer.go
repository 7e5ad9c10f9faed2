package promobserver

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// maxEventTypes bounds Options.EventTypes. Each type has up to eight series per source in every
// process.
const maxEventTypes = 100

// otherType stands for all event types that Options.EventTypes does not name.
const otherType = "other"

// Options say what is measured beyond the default. The zero value is fine.
type Options struct {
	// Sources are the sources whose counters exist from the start, at zero. Prometheus does not see
	// a counter that begins at 1 grow, so without it an alert on the first failure of a process
	// stays silent. A source that is not named is counted from its first request on. Default none.
	Sources []string

	// EventTypes are the event types that inbox_events_total distinguishes, at most 100; all others
	// are "other". A list and not "all", because the sender chooses types, and each one costs
	// series for as long as the process lives. Default none: the label is empty.
	EventTypes []string

	// Buckets are the upper bounds of both histograms, in seconds, ascending. Default 0.005 to 30,
	// the latter being beyond any timeout that a relay should have.
	Buckets []float64
}

// Observer keeps Prometheus metrics of what becomes of events, and is the prometheus.Collector of
// these. Its method Observe is for [consumer.Config].Observe. It is safe for concurrent use, by any
// number of middlewares and inboxes. Its zero value is of no use: see [New].
type Observer struct {
	options Options
	types   map[string]bool

	requests       *prometheus.CounterVec
	events         *prometheus.CounterVec
	failed         *prometheus.CounterVec
	commitFailures *prometheus.CounterVec
	requestTime    *prometheus.HistogramVec
	handlerTime    *prometheus.HistogramVec
}

var _ prometheus.Collector = (*Observer)(nil)

// New returns the Observer that is registered with registerer. Called again with the same
// registerer and options it returns the same one; with other options, or where one of the names is
// registered already, it fails and registers nothing.
func New(registerer prometheus.Registerer, options Options) (*Observer, error) {
	if registerer == nil {
		return nil, errors.New("promobserver: New needs a registerer, such as prometheus.DefaultRegisterer")
	}
	options, err := options.complete()
	if err != nil {
		return nil, fmt.Errorf("promobserver: %w", err)
	}
	o := newObserver(options)
	err = registerer.Register(o)
	if registered, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		existing, ok := registered.ExistingCollector.(*Observer)
		switch {
		case !ok:
			return nil, fmt.Errorf("promobserver: register metrics: %w", err)
		case !reflect.DeepEqual(existing.options, options):
			return nil, errors.New("promobserver: the registerer has an Observer with other Options: share one, or give all the same")
		}
		return existing, nil
	}
	if err != nil {
		return nil, fmt.Errorf("promobserver: register metrics: %w", err)
	}
	return o, nil
}

// complete checks options and fills in defaults. It returns a sorted copy: the caller may
// change its slices, and two callers may list the same in different orders.
func (o Options) complete() (Options, error) {
	o.Sources = slices.Compact(slices.Sorted(slices.Values(o.Sources)))
	o.EventTypes = slices.Compact(slices.Sorted(slices.Values(o.EventTypes)))
	o.Buckets = slices.Clone(o.Buckets)
	if len(o.Buckets) == 0 {
		o.Buckets = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30}
	}
	switch {
	case slices.Contains(o.Sources, ""):
		return o, errors.New("Options.Sources holds an empty text: name the sources as Config.Source does")
	case slices.Contains(o.EventTypes, ""):
		return o, errors.New("Options.EventTypes holds an empty text: name event types")
	case len(o.EventTypes) > maxEventTypes:
		return o, fmt.Errorf("Options.EventTypes holds %d types, at most %d are possible: name those that are worth an alert",
			len(o.EventTypes), maxEventTypes)
	}
	for i, bound := range o.Buckets {
		if !(bound > 0) || i > 0 && bound <= o.Buckets[i-1] {
			return o, fmt.Errorf("Options.Buckets: %v is not above what precedes it: list seconds, ascending", bound)
		}
	}
	return o, nil
}

func newObserver(options Options) *Observer {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	histogram := func(name, help string, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: options.Buckets}, labels)
	}
	o := &Observer{
		options: options,
		types:   make(map[string]bool, len(options.EventTypes)),

		requests: counter("inbox_requests_total",
			"Requests, by their outcome.", "source", "result"),
		events: counter("inbox_events_total",
			"Events that a handler has worked, by what came of it.", "source", "mode", "result", "event_type"),
		failed: counter("inbox_failed_total",
			"Failures after which neither sender nor worker tries again.", "source", "mode"),
		commitFailures: counter("inbox_commit_failures_total",
			"Handlers that succeeded, and whose work was not committed.", "source", "mode"),
		requestTime: histogram("inbox_request_duration_seconds",
			"How long requests took, from their headers to their answer.", "source", "result"),
		handlerTime: histogram("inbox_handler_duration_seconds",
			"How long handlers took.", "source", "mode"),
	}
	for _, name := range options.EventTypes {
		o.types[name] = true
	}
	for _, source := range options.Sources {
		o.begin(source)
	}
	return o
}

// Modes are the values of the label mode.
const (
	modeRequest = "request"
	modeInbox   = "inbox"
)

// begin makes the counters of a source exist. Histograms are left out: no alert waits for their
// first value.
func (o *Observer) begin(source string) {
	for _, result := range []consumer.Result{
		consumer.ResultProcessed, consumer.ResultIgnored, consumer.ResultRecorded, consumer.ResultDuplicate,
		consumer.ResultInFlight, consumer.ResultKeyReused, consumer.ResultOtherDestination, consumer.ResultForgotten, consumer.ResultRejected,
		consumer.ResultBreakerOpen, consumer.ResultUnavailable, consumer.ResultFailed, consumer.ResultCommitFailed,
	} {
		o.requests.WithLabelValues(source, string(result))
	}
	for _, mode := range []string{modeRequest, modeInbox} {
		o.failed.WithLabelValues(source, mode)
		o.commitFailures.WithLabelValues(source, mode)
	}
}

// Observe counts and measures a request, or an attempt of an inbox's worker.
func (o *Observer) Observe(_ context.Context, report consumer.Report) {
	mode, result := modeRequest, string(report.Result)
	if report.Inbox {
		mode = modeInbox
	} else {
		o.requests.WithLabelValues(report.Source, result).Inc()
		o.requestTime.WithLabelValues(report.Source, result).Observe(report.Duration.Seconds())
	}
	switch report.Result {
	case consumer.ResultProcessed, consumer.ResultIgnored, consumer.ResultFailed, consumer.ResultCommitFailed:
		o.events.WithLabelValues(report.Source, mode, result, o.typeLabel(report.Event.Type)).Inc()
	}
	if report.HandlerDuration > 0 { // otherwise it did not run
		o.handlerTime.WithLabelValues(report.Source, mode).Observe(report.HandlerDuration.Seconds())
	}
	if report.Final {
		o.failed.WithLabelValues(report.Source, mode).Inc()
	}
	if report.Result == consumer.ResultCommitFailed {
		o.commitFailures.WithLabelValues(report.Source, mode).Inc()
	}
}

func (o *Observer) typeLabel(name string) string {
	switch {
	case len(o.types) == 0:
		return ""
	case o.types[name]:
		return name
	}
	return otherType
}

// Describe sends the descriptions of all metrics.
func (o *Observer) Describe(descriptions chan<- *prometheus.Desc) {
	for _, c := range o.collectors() {
		c.Describe(descriptions)
	}
}

// Collect sends all metrics.
func (o *Observer) Collect(metrics chan<- prometheus.Metric) {
	for _, c := range o.collectors() {
		c.Collect(metrics)
	}
}

func (o *Observer) collectors() []prometheus.Collector {
	return []prometheus.Collector{o.requests, o.events, o.failed, o.commitFailures, o.requestTime, o.handlerTime}
}
