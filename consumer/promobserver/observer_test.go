package promobserver_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/consumer/promobserver"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

const secretText = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDE="

// post sends what a relay would send for an event of a type, to a handler that answers as the key
// says.
func post(t *testing.T, url, key, eventType, secret string) int {
	t.Helper()
	event := consumer.Event{IdempotencyKey: key, Type: eventType, Payload: []byte(`{"total":"19.90"}`)}
	r, err := consumertest.NewRequest(t.Context(), url, event, secret)
	pgtest.Must(t, err)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(r)
	pgtest.Must(t, err)
	answer.Body.Close()
	return answer.StatusCode
}

// receiver is a real receiver over a real database. Its handler fails for keys that begin with
// "bad", and violates a deferred constraint, so that its COMMIT fails, for those that begin with
// "late".
func receiver(t *testing.T, dsn, source string, observe func(context.Context, consumer.Report)) (url string) {
	t.Helper()
	cfg := consumer.Config{Receiver: "logistics", Secrets: []string{secretText}, Source: source, Observe: observe, Logger: slog.New(slog.DiscardHandler)}
	server := httptest.NewServer(must(consumer.New(pgtest.Pool(t, dsn), cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if strings.HasPrefix(event.IdempotencyKey, "late") {
			if _, err := tx.Exec(ctx, "INSERT INTO child VALUES (7)"); err != nil {
				t.Error(err)
			}
		}
		if strings.HasPrefix(event.IdempotencyKey, "bad") {
			return errors.New("bad")
		}
		return nil
	})))
	t.Cleanup(server.Close)
	return server.URL
}

func newDatabase(t *testing.T) string {
	t.Helper()
	dsn := pgtest.New(t, migrations.Inbox)
	_, err := pgtest.Pool(t, dsn).Exec(t.Context(), `CREATE TABLE parent (id int PRIMARY KEY);
		CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)`)
	pgtest.Must(t, err)
	return dsn
}

func mustNew(t *testing.T, registerer prometheus.Registerer, options promobserver.Options) *promobserver.Observer {
	t.Helper()
	o, err := promobserver.New(registerer, options)
	pgtest.Must(t, err)
	return o
}

// wantMetrics compares whole metrics, so that a series too many is found as well as one too few.
func wantMetrics(t *testing.T, gatherer prometheus.Gatherer, names []string, want string) {
	t.Helper()
	if err := testutil.GatherAndCompare(gatherer, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
}

func TestRequestsAreCounted(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	options := promobserver.Options{EventTypes: []string{"invoice.paid"}}
	dsn := newDatabase(t)
	finance := receiver(t, dsn, "finance", mustNew(t, registry, options).Observe)
	logistics := receiver(t, dsn, "logistics", mustNew(t, registry, options).Observe) // another part of the program

	other := "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDI="
	for _, request := range []struct {
		url, key, eventType, secret string
		status                      int
	}{
		{finance, "k1", "invoice.paid", secretText, 204},
		{finance, "k1", "invoice.paid", secretText, 204}, // a duplicate
		{finance, "k2", "invoice.created", secretText, 204},
		{finance, "bad1", "invoice.paid", secretText, 500},
		{finance, "late1", "invoice.paid", secretText, 500},
		{finance, "k3", "invoice.paid", other, 401},
		{logistics, "k1", "invoice.paid", secretText, 204},
	} {
		if status := post(t, request.url, request.key, request.eventType, request.secret); status != request.status {
			t.Errorf("%s: status %d, want %d", request.key, status, request.status)
		}
	}

	wantMetrics(t, registry, []string{"inbox_requests_total", "inbox_events_total", "inbox_commit_failures_total", "inbox_failed_total"}, `
# HELP inbox_commit_failures_total Handlers that succeeded, and whose work was not committed.
# TYPE inbox_commit_failures_total counter
inbox_commit_failures_total{mode="request",source="finance"} 1
# HELP inbox_events_total Events that a handler has worked, by what came of it.
# TYPE inbox_events_total counter
inbox_events_total{event_type="invoice.paid",mode="request",result="commit_failed",source="finance"} 1
inbox_events_total{event_type="invoice.paid",mode="request",result="failed",source="finance"} 1
inbox_events_total{event_type="invoice.paid",mode="request",result="processed",source="finance"} 1
inbox_events_total{event_type="invoice.paid",mode="request",result="processed",source="logistics"} 1
inbox_events_total{event_type="other",mode="request",result="processed",source="finance"} 1
# HELP inbox_requests_total Requests, by their outcome.
# TYPE inbox_requests_total counter
inbox_requests_total{result="commit_failed",source="finance"} 1
inbox_requests_total{result="duplicate",source="finance"} 1
inbox_requests_total{result="failed",source="finance"} 1
inbox_requests_total{result="processed",source="finance"} 2
inbox_requests_total{result="processed",source="logistics"} 1
inbox_requests_total{result="rejected",source="finance"} 1
`)
	// The handler ran for four of finance's six requests; each request was measured.
	if n := samples(t, registry, "inbox_handler_duration_seconds", "finance"); n != 4 {
		t.Errorf("%d handlers measured, want 4", n)
	}
	if n := samples(t, registry, "inbox_request_duration_seconds", "finance"); n != 6 {
		t.Errorf("%d requests measured, want 6", n)
	}
}

// samples returns how many values the histograms of a source hold.
func samples(t *testing.T, gatherer prometheus.Gatherer, name, source string) (n uint64) {
	t.Helper()
	families, err := gatherer.Gather()
	pgtest.Must(t, err)
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if family.GetName() == name && label.GetName() == "source" && label.GetValue() == source {
					n += metric.GetHistogram().GetSampleCount()
				}
			}
		}
	}
	return n
}

func TestWorkersAreCountedApart(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	o := mustNew(t, registry, promobserver.Options{})
	event := consumer.Event{Source: "finance", IdempotencyKey: "k", Type: "invoice.paid"}
	failure := errors.New("no such customer")
	for _, report := range []consumer.Report{
		{Result: consumer.ResultProcessed, HandlerDuration: time.Millisecond},
		{Result: consumer.ResultIgnored, HandlerDuration: time.Millisecond},
		{Result: consumer.ResultFailed, HandlerDuration: time.Millisecond, Err: failure},
		{Result: consumer.ResultFailed, HandlerDuration: time.Millisecond, Err: failure, Final: true},
		{Result: consumer.ResultCommitFailed, HandlerDuration: time.Millisecond, Err: failure},
	} {
		report.Source, report.Event, report.Inbox = "finance", event, true
		o.Observe(context.Background(), report)
	}
	wantMetrics(t, registry, []string{"inbox_requests_total", "inbox_events_total", "inbox_commit_failures_total", "inbox_failed_total"}, `
# HELP inbox_commit_failures_total Handlers that succeeded, and whose work was not committed.
# TYPE inbox_commit_failures_total counter
inbox_commit_failures_total{mode="inbox",source="finance"} 1
# HELP inbox_events_total Events that a handler has worked, by what came of it.
# TYPE inbox_events_total counter
inbox_events_total{event_type="",mode="inbox",result="commit_failed",source="finance"} 1
inbox_events_total{event_type="",mode="inbox",result="failed",source="finance"} 2
inbox_events_total{event_type="",mode="inbox",result="ignored",source="finance"} 1
inbox_events_total{event_type="",mode="inbox",result="processed",source="finance"} 1
# HELP inbox_failed_total Failures after which neither sender nor worker tries again.
# TYPE inbox_failed_total counter
inbox_failed_total{mode="inbox",source="finance"} 1
`)
	if n := samples(t, registry, "inbox_handler_duration_seconds", "finance"); n != 5 {
		t.Errorf("%d handlers measured, want 5", n)
	}
}

// Prometheus sees no growth in a counter that begins at 1: what an alert waits for has to be there
// before.
func TestNamedSourcesBeginAtZero(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	mustNew(t, registry, promobserver.Options{Sources: []string{"finance"}})
	wantMetrics(t, registry, []string{"inbox_failed_total"}, `
# HELP inbox_failed_total Failures after which neither sender nor worker tries again.
# TYPE inbox_failed_total counter
inbox_failed_total{mode="inbox",source="finance"} 0
inbox_failed_total{mode="request",source="finance"} 0
`)
	if n, err := testutil.GatherAndCount(registry, "inbox_requests_total"); n != 13 || err != nil {
		t.Errorf("%d results begin at zero (%v), want all 13", n, err)
	}
}

func TestMetricsAreNamedAsPrometheusAdvises(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	o := mustNew(t, registry, promobserver.Options{Sources: []string{"finance"}, EventTypes: []string{"invoice.paid"}})
	o.Observe(t.Context(), consumer.Report{Result: consumer.ResultCommitFailed, Source: "finance", HandlerDuration: 1, Final: true})
	problems, err := testutil.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
}

// However many keys, types and sources' events pass, there are as many series as the configuration
// makes room for.
func TestSeriesDoNotGrowWithEvents(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	o := mustNew(t, registry, promobserver.Options{Sources: []string{"finance"}, EventTypes: []string{"invoice.paid"}})
	series := func(events int) int {
		for i := range events {
			event := consumer.Event{
				Source: "finance", IdempotencyKey: fmt.Sprint("key", i), Type: fmt.Sprint("type", i), OrderingKey: fmt.Sprint("customer", i),
				RelatedReference: fmt.Sprint("INV-", i), DeliveryID: fmt.Sprint("delivery", i), ID: int64(i), Attempt: i,
			}
			o.Observe(t.Context(), consumer.Report{
				Result: consumer.ResultFailed, Source: "finance", Event: event, Status: 100 + i,
				Err: fmt.Errorf("failure %d", i), HandlerDuration: time.Duration(i + 1), Final: true,
			})
		}
		n, err := testutil.GatherAndCount(registry)
		pgtest.Must(t, err)
		return n
	}
	if one, many := series(1), series(500); one != many {
		t.Errorf("%d series after one event, %d after 500", one, many)
	}
}

func TestOneObserverPerRegisterer(t *testing.T) {
	t.Parallel()
	options := promobserver.Options{Sources: []string{"b", "a"}, EventTypes: []string{"x", "y"}}
	same := promobserver.Options{Sources: []string{"a", "b", "a"}, EventTypes: []string{"y", "x"}}
	registry := prometheus.NewPedanticRegistry()
	first := mustNew(t, registry, options)
	if second := mustNew(t, registry, same); second != first {
		t.Error("the same options made a second Observer")
	}
	testkit.Equal(t, "the caller's options were changed", options.Sources[0], "b")
	if _, err := promobserver.New(registry, promobserver.Options{}); err == nil || !strings.Contains(err.Error(), "other Options") {
		t.Errorf("other options: %v", err)
	}

	// One with labels or a prefix of its own is another registerer.
	wrapped := prometheus.WrapRegistererWithPrefix("finance_", registry)
	third := mustNew(t, wrapped, options)
	if third == first {
		t.Error("a prefix of its own was disregarded")
	}
	if fourth := mustNew(t, wrapped, same); fourth != third {
		t.Error("the same options made a second Observer behind a prefix")
	}

	taken := prometheus.NewPedanticRegistry()
	taken.MustRegister(prometheus.NewCounter(prometheus.CounterOpts{Name: "inbox_requests_total", Help: "Of another package."}))
	if _, err := promobserver.New(taken, options); err == nil {
		t.Error("a name that is taken was accepted")
	}
	if n, err := testutil.GatherAndCount(taken); n != 1 || err != nil {
		t.Errorf("%d metrics (%v) beside the one that was there before", n-1, err)
	}
}

func TestMistakesAreRefused(t *testing.T) {
	t.Parallel()
	many := make([]string, 101)
	for i := range many {
		many[i] = fmt.Sprint("type", i)
	}
	for name, options := range map[string]promobserver.Options{
		"empty source":       {Sources: []string{"finance", ""}},
		"empty event type":   {EventTypes: []string{""}},
		"too many types":     {EventTypes: many},
		"buckets descending": {Buckets: []float64{1, 0.5}},
		"a bucket twice":     {Buckets: []float64{1, 1}},
		"a bucket of zero":   {Buckets: []float64{0, 1}},
	} {
		if _, err := promobserver.New(prometheus.NewPedanticRegistry(), options); err == nil || !strings.Contains(err.Error(), "Options.") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := promobserver.New(nil, promobserver.Options{}); err == nil {
		t.Error("no registerer was accepted")
	}
}

var metricName = regexp.MustCompile(`\binbox_[a-z_]+`)

// The documentation names metrics that exist, and all of them.
func TestDocumentedMetrics(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("doc.go")
	pgtest.Must(t, err)
	registry := prometheus.NewPedanticRegistry()
	o := mustNew(t, registry, promobserver.Options{Sources: []string{"finance"}})
	o.Observe(t.Context(), consumer.Report{Result: consumer.ResultProcessed, Source: "finance", HandlerDuration: 1})
	registry.MustRegister(promobserver.Breaker("warehouse", must(breaker.New(breaker.Config{}))))
	families, err := registry.Gather()
	pgtest.Must(t, err)
	var exported []string
	for _, family := range families {
		exported = append(exported, family.GetName())
	}
	documented := slices.Compact(slices.Sorted(slices.Values(metricName.FindAllString(string(text), -1))))
	if !slices.Equal(documented, exported) {
		t.Errorf("documented %q\nexported   %q", documented, exported)
	}
}

// must returns value. It panics when err is not nil.
func must[T any](value T, err error) T {
	if err != nil {
		panic(err.Error())
	}
	return value
}
