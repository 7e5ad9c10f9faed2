package elsewhere

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

const (
	secret      = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDE="
	oldSecret   = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDI="
	otherSecret = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDM="
)

// invoice is the payload of an event.
func invoice(number string) string { return fmt.Sprintf(`{"invoice":%q,"total":"19.90"}`, number) }

// signing says how to make a request otherwise than a relay does now.
type signing struct {
	at     time.Time
	change func(http.Header) // before the request is signed
	tamper func(http.Header) // afterwards

	secret    string // of a question
	underived bool   // a question is signed as a delivery is
}

// request makes what a relay sends.
func request(ctx context.Context, url, key, body string, s signing) (*http.Request, error) {
	h := http.Header{
		"Content-Type":           {"application/json"},
		webhook.IdempotencyKey:   {key},
		webhook.EventType:        {"invoice.created"},
		webhook.EventVersion:     {"1"},
		webhook.EventID:          {"4711"},
		webhook.CreatedAt:        {stamp(time.Now())},
		webhook.Attempt:          {"1"},
		webhook.DeliveryID:       {"4711-other-1795346260936559"}, // opaque
		webhook.Destination:      {"logistics-1"},
		"X-Event-Tenant":         {"a"},
		"Ce-Type":                {"invoice.created"},
		webhook.NotAfter:         {stamp(time.Now().Add(720 * time.Hour))},
		webhook.RelatedReference: {"INV-4711"},
	}
	if s.change != nil {
		s.change(h)
	}
	if s.at.IsZero() {
		s.at = time.Now()
	}
	parsed, err := webhook.ParseSecret(secret)
	if err != nil {
		return nil, err
	}
	webhook.Sign(h, []byte(body), s.at, parsed)
	if s.tamper != nil {
		s.tamper(h)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.GetBody = nil // by which net/http would send it twice, on its own
	r.Header = h
	return r, nil
}

// stamp writes a time as a relay does.
func stamp(at time.Time) string { return at.UTC().Format("2006-01-02T15:04:05.000000Z07:00") }

// answer is one that has been read to its end.
type answer struct {
	status  int
	replay  string
	retry   string
	problem string // of a refusal, without the prefix
	title   string // of a refusal
	text    string
}

func (r *receiver) post(ctx context.Context, url, key, body string, s signing) (answer, error) {
	request, err := request(ctx, url, key, body, s)
	if err != nil {
		return answer{}, err
	}
	return r.do(request)
}

func (r *receiver) do(request *http.Request) (answer, error) {
	response, err := r.client.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	got := answer{
		status: response.StatusCode, text: string(text),
		replay: response.Header.Get("Idempotency-Replayed"), retry: response.Header.Get("Retry-After"),
	}
	var problem struct {
		Type, Title, Detail string
		Status              int
	}
	if response.Header.Get("Content-Type") == "application/problem+json" && json.Unmarshal(text, &problem) == nil &&
		problem.Status == got.status && problem.Title != "" && problem.Detail != "" {
		got.problem, got.title = strings.TrimPrefix(problem.Type, "urn:outbox-relay:problem:"), problem.Title
	}
	return got, err
}

func (r *receiver) send(t *testing.T, key, body string, s signing) answer {
	t.Helper()
	got, err := r.post(t.Context(), r.url, key, body, s)
	pgtest.Must(t, err)
	return got
}

// begin sends a request whose answer comes later; an error is one with the status 0.
func (r *receiver) begin(t *testing.T, url, key, body string) <-chan answer {
	t.Helper()
	return r.beginAs(t, url, key, body, signing{})
}

func (r *receiver) beginAs(t *testing.T, url, key, body string, s signing) <-chan answer {
	t.Helper()
	answers := make(chan answer, 1)
	go func() {
		got, err := r.post(context.WithoutCancel(t.Context()), url, key, body, s)
		if err != nil {
			got = answer{text: err.Error()}
		}
		answers <- got
	}()
	return answers
}

func wantFirst(t *testing.T, got answer) {
	t.Helper()
	if got.status != http.StatusNoContent || got.replay != "" || got.text != "" {
		t.Errorf("got %+v, want 204, not replayed", got)
	}
}

func wantDuplicate(t *testing.T, got answer, status int) {
	t.Helper()
	if got.status != status || got.replay != "true" || got.text != "" {
		t.Errorf("got %+v, want %d, replayed", got, status)
	}
}

func wantProblem(t *testing.T, got answer, status int, name string) {
	t.Helper()
	wantRetry := ""
	if status == http.StatusServiceUnavailable || status == http.StatusConflict {
		wantRetry = "1"
	}
	if got.status != status || got.problem != name || got.retry != wantRetry || got.replay != "" {
		t.Errorf("got %+v, want %d %s, Retry-After %q", got, status, name, wantRetry)
	}
	if title := titleInGo(t, name); got.title != title {
		t.Errorf("%s: got the title %q, want that of package consumer, %q", name, got.title, title)
	}
}

// titleInGo returns the title that package consumer gives a refusal.
func titleInGo(t *testing.T, name string) string {
	t.Helper()
	files, err := filepath.Glob("../*.go")
	pgtest.Must(t, err)
	for _, file := range files {
		source, err := os.ReadFile(file)
		pgtest.Must(t, err)
		if found := regexp.MustCompile(`newProblem\(http\.\w+, "` + name + `", "([^"]+)"`).FindSubmatch(source); found != nil {
			return string(found[1])
		}
	}
	t.Errorf("package consumer has no refusal %s", name)
	return ""
}

// set returns a change of one header.
func set(name, value string) func(http.Header) {
	return func(h http.Header) { h[name] = []string{value} }
}
