package post_test

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

func TestUsableDestinations(t *testing.T) {
	t.Parallel()
	share := 0.0
	for name, change := range map[string]func(*post.Destination){
		"defaults":    func(*post.Destination) {},
		"no jitter":   func(d *post.Destination) { d.Retry.Jitter = &share },
		"one attempt": func(d *post.Destination) { d.Retry.MaxAttempts = 1 },
		"moved codes": func(d *post.Destination) {
			d.Responses = policy.Responses{Retry: []int{400, 410}, Fail: []int{300, 599}}
		},
		"own headers": func(d *post.Destination) { d.Headers = map[string]string{"Authorization": "Bearer x", "X-A": ""} },
	} {
		for _, problem := range problemsOf(change) {
			t.Errorf("%s: %v", name, problem)
		}
	}
}

// problemsOf returns the mistakes in a destination that is changed from one without any.
func problemsOf(change func(*post.Destination)) []check.Problem {
	d := post.Destination{Name: "d", URL: "https://logistics.internal/webhooks/finance"}
	change(&d)
	return d.WithDefaults(post.Egress{}).Problems("destinations.d")
}

func TestEveryMistakeInADestinationIsFound(t *testing.T) {
	t.Parallel()
	header := func(name, value string) func(*post.Destination) {
		return func(d *post.Destination) { d.Headers = map[string]string{name: value} }
	}
	schedule := func(delays ...time.Duration) func(*post.Destination) {
		return func(d *post.Destination) { d.Retry.Schedule = delays }
	}
	jitter := func(j float64) func(*post.Destination) { return func(d *post.Destination) { d.Retry.Jitter = &j } }
	for name, c := range map[string]struct {
		change func(*post.Destination)
		want   string // the beginning of the problem
	}{
		"timeout negative":      {func(d *post.Destination) { d.Timeout = -1 }, "destinations.d.timeout: "},
		"lane negative":         {func(d *post.Destination) { d.MaxInFlight = -1 }, "destinations.d.max_in_flight: "},
		"lane huge":             {func(d *post.Destination) { d.MaxInFlight = 10_001 }, "destinations.d.max_in_flight: "},
		"attempts negative":     {func(d *post.Destination) { d.Retry.MaxAttempts = -1 }, "destinations.d.retry.max_attempts: "},
		"attempts huge":         {func(d *post.Destination) { d.Retry.MaxAttempts = 1001 }, "destinations.d.retry.max_attempts: "},
		"jitter negative":       {jitter(-0.1), "destinations.d.retry.jitter: "},
		"jitter above one":      {jitter(1.1), "destinations.d.retry.jitter: "},
		"jitter not a number":   {jitter(math.NaN()), "destinations.d.retry.jitter: "},
		"retry after negative":  {func(d *post.Destination) { d.Retry.RetryAfterMax = -1 }, "destinations.d.retry.retry_after_max: "},
		"delay zero":            {schedule(time.Second, 0), "destinations.d.retry.schedule[1]: "},
		"delay negative":        {schedule(-time.Second), "destinations.d.retry.schedule[0]: "},
		"delay overflows":       {schedule(1<<63 - 1), "destinations.d.retry.schedule[0]: "},
		"schedule of 101":       {schedule(make([]time.Duration, 101)...), "destinations.d.retry.schedule: 101 entries"},
		"moved 200":             {func(d *post.Destination) { d.Responses.Fail = []int{200} }, "destinations.d.responses.fail: 200"},
		"moved 600":             {func(d *post.Destination) { d.Responses.Retry = []int{600} }, "destinations.d.responses.retry: 600"},
		"moved 0":               {func(d *post.Destination) { d.Responses.Retry = []int{0} }, "destinations.d.responses.retry: 0"},
		"moved to both":         {func(d *post.Destination) { d.Responses = policy.Responses{Retry: []int{500}, Fail: []int{500}} }, "destinations.d.responses: 500 stands in both"},
		"header empty":          {header("", "x"), "destinations.d.headers.: is not a header name"},
		"header with space":     {header("X A", "x"), "destinations.d.headers.X A: is not a header name"},
		"header beyond ASCII":   {header("X-Ä", "x"), "destinations.d.headers.X-Ä: is not a header name"},
		"header value CRLF":     {header("X-A", "a\r\nB: c"), "destinations.d.headers.X-A: has a value"},
		"header value NUL":      {header("X-A", "a\x00"), "destinations.d.headers.X-A: has a value"},
		"header value latin-1":  {header("X-A", "\xe4"), "destinations.d.headers.X-A: has a value"},
		"header huge":           {header("X-A", strings.Repeat("x", 8192)), "destinations.d.headers.X-A: is longer"},
		"header Host":           {header("host", "x"), "destinations.d.headers.host: is set by the relay"},
		"header Content-Length": {header("Content-Length", "1"), "destinations.d.headers.Content-Length: is set by"},
		"header Connection":     {header("Connection", "close"), "destinations.d.headers.Connection: is set by"},
		"header key":            {header("x-idempotency-KEY", "x"), "destinations.d.headers.x-idempotency-KEY: is set by"},
		"header of contract":    {header("X-Outbox-Replay", "true"), "destinations.d.headers.X-Outbox-Replay: is set by"},
		"header signature":      {header("Webhook-Signature", "v1,x"), "destinations.d.headers.Webhook-Signature: is set by"},
		"url missing":           {func(d *post.Destination) { d.URL = "" }, "destinations.d.url: is empty"},
		"header twice": {
			func(d *post.Destination) { d.Headers = map[string]string{"X-A": "1", "x-a": "2"} },
			"destinations.d.headers.x-a: stands twice",
		},
	} {
		problems := problemsOf(c.change)
		if !slices.ContainsFunc(problems, func(p check.Problem) bool { return strings.HasPrefix(p.Error(), c.want) }) {
			t.Errorf("%s: %v, want %q", name, problems, c.want)
		}
	}
}
