package post

import (
	"bufio"
	"bytes"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"pgregory.net/rapid"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

func TestTimesAreFormattedAsPackageTimeDoes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		at := time.Unix(rapid.Int64Range(-62_135_596_800, 400_000_000_000).Draw(t, "second"), rapid.Int64Range(0, 999_999_999).Draw(t, "nanosecond"))
		at = at.In(time.FixedZone("somewhere", rapid.IntRange(-50_000, 50_000).Draw(t, "zone")))
		if got, want := formatTime(at), at.UTC().Format(TimeFormat); got != want {
			t.Fatalf("%s is formatted as %q, want %q", at, got, want)
		}
	})
}

// The memory of a request serves later ones. Nothing of the event before reaches the next receiver.
func TestRequestsShareNoHeaders(t *testing.T) {
	t.Parallel()
	var got []http.Header
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = append(got, r.Header) }))
	defer server.Close()
	to, err := NewEndpoint(Destination{Name: "default", URL: server.URL}.WithDefaults(Egress{}), "test")
	testkit.Must(t, err)
	defer to.CloseIdleConnections()
	kind, version, key := "invoice.created", 1, "invoice-4711"
	bare := Message{EventID: 1, Destination: "default", Fence: 1, Attempt: 1, Event: Event{
		EventType: &kind, Version: &version, Key: &key, Payload: []byte(`{"n":1}`), CreatedAt: pgtype.Timestamptz{Time: time.Unix(1e9, 0), Valid: true},
	}}
	full := bare
	full.Replay, full.NotAfter = true, time.Unix(2e9, 0)
	full.OrderingKey, full.RelatedReference = &key, &key
	full.Headers = []byte(`{"ce-a1": "x", "ce-a2": "x", "ce-a3": "x", "ce-a4": "x", "ce-a5": "x", "ce-a6": "x", "ce-a7": "x", "ce-a8": "x", "ce-a9": "x", "ce-b1": "x", "ce-b2": "x", "ce-b3": "x"}`)
	for _, message := range []Message{bare, full, bare, bare} {
		if result := to.Deliver(t.Context(), message, nil); result.StatusCode != http.StatusOK {
			t.Fatalf("the message was not delivered: %+v", result)
		}
	}
	if len(got[1]) < len(got[0])+16 {
		t.Errorf("of the full message arrived %v", got[1])
	}
	for _, after := range got[2:] {
		if !slices.Equal(slices.Sorted(maps.Keys(after)), slices.Sorted(maps.Keys(got[0]))) {
			t.Errorf("after another request arrived %v, want the headers of %v", after, got[0])
		}
	}
}

// A receiver sees the same request whether net/http has written it or the relay itself.
func TestRequestReadsAsThatOfNetHTTP(t *testing.T) {
	t.Parallel()
	secret, err := webhook.ParseSecret("whsec_b3V0Ym94LXJlbGF5IGJlbmNobWFyayBzZWNyZXQ=")
	testkit.Must(t, err)
	kind, version, key, reference := "invoice.created", 1, "invoice-4711", "order 7"
	for name, destination := range map[string]Destination{
		"plain":       {URL: "http://receiver.test"},
		"with a path": {URL: "http://user:word@receiver.test:8080/a%20b/?q=1&x=%2F#part"},
		"IPv6":        {URL: "http://[fe80::1%25eth0]:80/x"},
		"signed":      {URL: "http://receiver.test/", SigningSecrets: []webhook.Secret{secret, secret}, Headers: map[string]string{"X-Own": "a", "user-agent": "me"}},
		"CloudEvents": {URL: "http://receiver.test/", Wire: Wire{Format: FormatCloudEvents, Source: "/test"}},
	} {
		destination.Name = "default"
		to, err := NewEndpoint(destination.WithDefaults(Egress{}), "test")
		testkit.Must(t, err)
		message := Message{EventID: 1, Destination: "default", Fence: 1, Attempt: 1, NotAfter: time.Unix(2e9, 0), Replay: true, Event: Event{
			EventType: &kind, Version: &version, Key: &key, OrderingKey: &key, RelatedReference: &reference, Payload: []byte(`{"n":1}`),
			Headers: []byte(`{"x-event-a": "b  c", "Traceparent": "00-1-2-3"}`), CreatedAt: pgtype.Timestamptz{Time: time.Unix(1e9, 0), Valid: true},
		}}
		request, err := NewRequest(to, message, time.Unix(1e9, 0))
		testkit.Must(t, err)
		if !to.direct.fits(request, message.Payload) {
			t.Errorf("%s: the relay does not write it itself", name)
		}
		var byNetHTTP bytes.Buffer
		testkit.Must(t, request.HTTP(message.Payload).Write(&byNetHTTP))
		want, wantBody := readRequest(t, byNetHTTP.Bytes())
		got, body := readRequest(t, request.appendTo(nil, message.Payload))
		if got.Method != want.Method || got.RequestURI != want.RequestURI || got.Host != want.Host || got.Proto != want.Proto ||
			!maps.EqualFunc(got.Header, want.Header, slices.Equal) || got.ContentLength != want.ContentLength || body != wantBody || got.Close != want.Close {
			t.Errorf("%s:\n%+v %s\nnet/http writes\n%+v %s", name, got, body, want, wantBody)
		}
	}
}

func readRequest(t *testing.T, text []byte) (request *http.Request, body string) {
	t.Helper()
	in := bufio.NewReader(bytes.NewReader(text))
	request, err := http.ReadRequest(in)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	read, err := io.ReadAll(request.Body)
	if err != nil || in.Buffered() > 0 {
		t.Fatalf("%v, and %d bytes more", err, in.Buffered())
	}
	return request, string(read)
}

// net/http refuses a header that would end early, and trims blanks. Such a request is left to it.
func TestOddValuesAreLeftToNetHTTP(t *testing.T) {
	t.Parallel()
	to, err := NewEndpoint(Destination{Name: "default", URL: "http://receiver.test"}.WithDefaults(Egress{}), "test")
	testkit.Must(t, err)
	for _, value := range []string{"", " a", "a ", "a\r\nB: c", "a\x00", "a\x7f", "\ta"} {
		if to.direct.fits(&Request{to: to, header: []field{{"Authorization", value}}}, nil) {
			t.Errorf("%q fits", value)
		}
	}
	for _, header := range []string{"Host", "Transfer-Encoding", "X-Outbox-Attempt"} {
		to, err := NewEndpoint(Destination{Name: "default", URL: "http://receiver.test", Headers: map[string]string{header: "x"}}.WithDefaults(Egress{}), "test")
		testkit.Must(t, err)
		if to.direct != nil {
			t.Errorf("with the header %s, which no configuration may have, requests are written by the relay", header)
		}
	}
}
