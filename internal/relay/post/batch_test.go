package post_test

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A batchReceiver takes batches, unless answer says otherwise, and notes what it gets.
type batchReceiver struct {
	*relaytest.Receiver
	logged  testkit.Buffer
	mu      sync.Mutex
	singles []string
	batches [][]string
}

// newBatchReceiver returns a receiver that offers batches. answer may answer a batch in its own
// way: then it returns true.
func newBatchReceiver(t testing.TB, answer func(w http.ResponseWriter, keys []string) bool) *batchReceiver {
	t.Helper()
	b := &batchReceiver{}
	b.Receiver = relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if !webhook.IsBatch(r.Header) {
			b.mu.Lock()
			b.singles = append(b.singles, r.Header.Get(webhook.IdempotencyKey))
			b.mu.Unlock()
			w.Header().Set(webhook.AcceptPost, webhook.BatchType)
			return
		}
		if err := webhook.VerifyBatch(r.Header, r.Body, time.Now(), time.Minute, secret(t, batchSecret)); err != nil {
			t.Error(err)
		}
		events, err := webhook.BatchSize(r.Header)
		relaytest.Must(t, err)
		envelopes, err := webhook.ParseBatch(r.Body, events)
		relaytest.Must(t, err)
		var keys []string
		for _, e := range envelopes {
			keys = append(keys, e.Header[webhook.IdempotencyKey])
			if string(e.Body) != payloadOf(e.Header[webhook.IdempotencyKey]) || e.Header[webhook.EventType] == "" || e.Header[webhook.Destination] != "default" || e.Header[webhook.Attempt] != "1" {
				t.Errorf("got %v %s", e.Header, e.Body)
			}
		}
		b.mu.Lock()
		b.batches = append(b.batches, keys)
		b.mu.Unlock()
		if answer != nil && answer(w, keys) {
			return
		}
		answerBatch(w, keys, 204)
	})
	return b
}

func answerBatch(w http.ResponseWriter, keys []string, status int) {
	w.Header().Set("Content-Type", webhook.BatchResultType)
	var body []byte
	for _, key := range keys {
		body = webhook.AppendLine(body, webhook.BatchResult{Key: key, Status: status})
	}
	_, _ = w.Write(body)
}

const batchSecret = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDE="

// payloadOf holds what a format might change: line feeds, quotes, and bytes that are no text.
func payloadOf(key string) string { return "{\"k\":\n\"" + key + "\"}\xff\x00" }

// deliverMany delivers n events at once, after one that lets the endpoint learn what the receiver
// offers.
func deliverMany(t testing.TB, b *batchReceiver, n int) (results map[string]policy.Result) {
	t.Helper()
	return deliverInBatches(t, b, n, 10)
}

func deliverInBatches(t testing.TB, b *batchReceiver, n, most int) (results map[string]policy.Result) {
	t.Helper()
	d := destinationOf(b.URL, post.Wire{}, post.Egress{})
	d.Headers = map[string]string{"X-Event-Stage": "test", "ce_zone": "a"} // of the batch, and signed with it
	d.Batch.Max, d.SigningSecrets = most, []webhook.Secret{secret(t, batchSecret)}
	e := endpointOf(t, d)
	e.Log = zerolog.New(&b.logged)
	deliver := func(key string) policy.Result {
		m := order()
		m.Key, m.Attempt, m.Payload = &key, 1, []byte(payloadOf(key))
		return e.Deliver(t.Context(), m, nil)
	}
	if v := deliver("first"); v.Reason != policy.ReasonOK {
		t.Fatalf("the first event: %+v", v)
	}
	results = map[string]policy.Result{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			key := "k" + strconv.Itoa(i)
			v := deliver(key)
			mu.Lock()
			defer mu.Unlock()
			results[key] = v
		})
	}
	all.Wait()
	return results
}

// A destination of which the defaults share requests may send each event by itself.
func TestBatchesOfOneAreNone(t *testing.T) {
	t.Parallel()
	b := newBatchReceiver(t, nil)
	for key, v := range deliverInBatches(t, b, 20, 1) {
		if v.Reason != policy.ReasonOK || v.Batch != 0 {
			t.Errorf("%s: %+v", key, v)
		}
	}
	if len(b.batches) > 0 {
		t.Errorf("events shared requests: %v", b.batches)
	}
}

func TestBatchesCarryWhatWaits(t *testing.T) {
	t.Parallel()
	const n = 200
	b := newBatchReceiver(t, nil)
	var sizes []int // as the results have them, of each batch once
	for key, v := range deliverMany(t, b, n) {
		if v.Reason != policy.ReasonOK || v.StatusCode != 204 {
			t.Errorf("%s: %+v", key, v)
		}
		if v.Batch > 0 {
			sizes = append(sizes, v.Batch)
		}
	}
	var carried []int
	for _, keys := range b.batches {
		carried = append(carried, len(keys))
	}
	slices.Sort(sizes)
	slices.Sort(carried)
	if !slices.Equal(sizes, carried) {
		t.Errorf("the batches have %v events, the results say %v", carried, sizes)
	}
	got := slices.Concat(b.batches...)
	slices.Sort(got)
	if len(got) != n || len(slices.Compact(got)) != n || len(b.batches) > n/2 || len(b.singles) != 1 {
		t.Errorf("%d events in %d batches, %d singles", len(got), len(b.batches), len(b.singles))
	}
	for _, keys := range b.batches {
		if len(keys) > 10 {
			t.Errorf("a batch of %d events", len(keys))
		}
	}
}

// A receiver's framework may write a content type in its own way.
func TestBatchAnswerMayNameItsCharset(t *testing.T) {
	t.Parallel()
	b := newBatchReceiver(t, func(w http.ResponseWriter, keys []string) bool {
		w.Header().Set("Content-Type", "Application/vnd.outbox-relay.batch-result+ndjson; charset=utf-8")
		for _, key := range keys {
			_, _ = w.Write(webhook.AppendLine(nil, webhook.BatchResult{Key: key, Status: 204}))
		}
		return true
	})
	deliverMany(t, b, 20)
	if len(b.singles) != 1 || len(b.batches) == 0 {
		t.Errorf("%d batches, %d single events", len(b.batches), len(b.singles))
	}
}

// Each event's answer means what it would mean alone, and an event without one is not delivered.
func TestBatchAnswersAreOfEachEvent(t *testing.T) {
	t.Parallel()
	b := newBatchReceiver(t, func(w http.ResponseWriter, keys []string) bool {
		w.Header().Set("Content-Type", webhook.BatchResultType)
		var body []byte
		for _, key := range keys {
			r := webhook.BatchResult{Key: key, Status: 204}
			switch key {
			case "k0":
				continue
			case "k1":
				r.Status, r.ContentType, r.Body = 422, "application/problem+json", `{"title":"No","detail":"never"}`
			case "k2":
				r.Status, r.RetryAfter = 503, "7"
			case "k3":
				body = webhook.AppendLine(body, r)
				r.Status = 500
			}
			body = webhook.AppendLine(body, r)
		}
		_, _ = w.Write(body)
		return true
	})
	results := deliverMany(t, b, 20)
	for key, v := range results {
		var ok bool
		switch key {
		case "k0", "k3":
			ok = v.Reason == policy.ReasonMalformed && v.Posted
		case "k1":
			ok = v.Reason == policy.ReasonRejected && strings.Contains(v.Message, "never")
		case "k2":
			ok = v.Reason == policy.ReasonUnavailable && v.RetryAfter == 7*time.Second
		default:
			ok = v.Reason == policy.ReasonOK
		}
		if !ok {
			t.Errorf("%s: %+v", key, v)
		}
	}
}

// A receiver that turns out not to take batches gets single events, whatever it answers, and no
// attempt is lost.
func TestBatchFallsBackToSingleEvents(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(w http.ResponseWriter){
		"400": func(w http.ResponseWriter) { w.WriteHeader(400) },
		"404": func(w http.ResponseWriter) { w.WriteHeader(404) },
		"415": func(w http.ResponseWriter) { w.WriteHeader(415) },
		"401": func(w http.ResponseWriter) { w.WriteHeader(401) },
		"413": func(w http.ResponseWriter) { w.WriteHeader(413) },
		"200": func(w http.ResponseWriter) { _, _ = w.Write([]byte("ok")) },
		"204": func(w http.ResponseWriter) { w.WriteHeader(204) },
		"json": func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"key":"k1","status":204}`))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBatchReceiver(t, func(w http.ResponseWriter, _ []string) bool { answer(w); return true })
			for key, v := range deliverMany(t, b, 50) {
				if v.Reason != policy.ReasonOK {
					t.Errorf("%s: %+v", key, v)
				}
			}
			slices.Sort(b.singles)
			if n := len(slices.Compact(b.singles)); n != 51 || len(b.singles) != 51 || len(b.batches) == 0 {
				t.Errorf("%d single events, %d batches", len(b.singles), len(b.batches))
			}
		})
	}
}

// hangBehind answers a batch with a text, and then with nothing until the relay hangs up.
func hangBehind(answer string) func(w http.ResponseWriter, keys []string) {
	return func(w http.ResponseWriter, _ []string) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer func() { _ = conn.Close() }()
		_, _ = conn.Write([]byte(answer))
		_, _ = conn.Read(make([]byte, 1))
	}
}

// The failure of a whole batch is that of each of its events.
func TestBatchFailsAsAWhole(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter, keys []string)
		want   policy.Reason
	}{
		"500": {func(w http.ResponseWriter, _ []string) { w.WriteHeader(500) }, policy.ReasonServerError},
		"503": {func(w http.ResponseWriter, _ []string) { w.WriteHeader(503) }, policy.ReasonUnavailable},
		"429": {func(w http.ResponseWriter, _ []string) { w.WriteHeader(429) }, policy.ReasonRateLimited},
		"301": {func(w http.ResponseWriter, _ []string) { w.WriteHeader(301) }, policy.ReasonRedirect},
		"cut": {func(http.ResponseWriter, []string) { panic(http.ErrAbortHandler) }, policy.ReasonNetwork},
		"cut in the answer": {func(w http.ResponseWriter, keys []string) {
			w.Header().Set("Content-Length", "1000000")
			answerBatch(w, keys, 204)
			panic(http.ErrAbortHandler)
		}, policy.ReasonNetwork},
		"no lines": {func(w http.ResponseWriter, _ []string) {
			w.Header().Set("Content-Type", webhook.BatchResultType)
			_, _ = w.Write(bytes.Repeat([]byte("x"), 1000))
		}, policy.ReasonMalformed},
		"101":         {hangBehind("HTTP/1.1 101 Switching Protocols\r\nContent-Type: application/problem+json\r\n\r\n"), policy.ReasonUnexpected},
		"101-upgrade": {hangBehind("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\nContent-Type: application/problem+json\r\n\r\n"), policy.ReasonUnexpected},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBatchReceiver(t, func(w http.ResponseWriter, keys []string) bool { c.answer(w, keys); return true })
			results := deliverMany(t, b, 20)
			for key, v := range results {
				if v.Reason != c.want || !v.Posted {
					t.Errorf("%s: %+v", key, v)
				}
			}
			if len(results) != 20 || len(b.singles) != 1 {
				t.Errorf("%d results, %d singles", len(results), len(b.singles))
			}
		})
	}
}

// A receiver that offers nothing never sees a batch, nor does one see an event again, or one that a
// relay may die of.
func TestBatchesNeedAnOffer(t *testing.T) {
	t.Parallel()
	batches := 0
	var mu sync.Mutex
	plain := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) {
		mu.Lock()
		defer mu.Unlock()
		if webhook.IsBatch(r.Header) {
			batches++
		}
	})
	without := &batchReceiver{Receiver: plain}
	deliverMany(t, without, 50)
	if batches > 0 || plain.Total() != 51 || !strings.Contains(without.logged.String(), "does not take batches") {
		t.Errorf("%d batches, %d requests: %s", batches, plain.Total(), without.logged.String())
	}
	b := newBatchReceiver(t, nil)
	d := destinationOf(b.URL, post.Wire{}, post.Egress{})
	d.Batch.Max = 10
	e := endpointOf(t, d)
	alone := func() *policy.Result { return nil }
	for _, c := range []struct {
		attempt int
		ready   func() *policy.Result
	}{{2, nil}, {1, alone}, {2, nil}} {
		m := order()
		m.Attempt = c.attempt
		e.Deliver(t.Context(), m, c.ready)
	}
	if len(b.batches) > 0 || len(b.singles) != 3 {
		t.Errorf("%d batches, %d singles", len(b.batches), len(b.singles))
	}
}

func TestBatchProblems(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		url  string
		max  int
		want string
	}{
		{"http://127.0.0.1/x", webhook.MaxBatchEvents, ""},
		{"http://127.0.0.1/x", webhook.MaxBatchEvents + 1, "d.batch.max"},
		{"http://127.0.0.1/x", -1, "d.batch.max"},
		{"nats://127.0.0.1", 10, "d.batch.max"},
		{"kafka://127.0.0.1", 10, "d.batch.max"},
	} {
		d := destinationOf(c.url, post.Wire{}, post.Egress{})
		d.Batch.Max = c.max
		text := fmt.Sprint(d.Problems("d"))
		if strings.Contains(text, "d.batch.max") != (c.want != "") {
			t.Errorf("%s, %d: %s", c.url, c.max, text)
		}
	}
}

// What the headers of an event hold is kept from errors, whether the receiver repeats it in the
// answer to the batch or to the event.
func TestBatchMasksTheHeadersOfItsEvents(t *testing.T) {
	t.Parallel()
	const token = "tok-9f8e7d6c5b4a3210"
	for name, answer := range map[string]func(w http.ResponseWriter, keys []string){
		"of an event": func(w http.ResponseWriter, keys []string) {
			w.Header().Set("Content-Type", webhook.BatchResultType)
			for _, key := range keys {
				_, _ = w.Write(webhook.AppendLine(nil, webhook.BatchResult{Key: key, Status: 500, ContentType: "text/plain", Body: "bad token " + token}))
			}
		},
		"of the batch": func(w http.ResponseWriter, _ []string) {
			http.Error(w, "bad token "+token, http.StatusInternalServerError)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBatchReceiver(t, func(w http.ResponseWriter, keys []string) bool { answer(w, keys); return true })
			d := destinationOf(b.URL, post.Wire{Excerpts: post.ExcerptsText, EventHeaders: []string{"X-Event-Token"}}, post.Egress{})
			d.Batch.Max, d.SigningSecrets = 10, []webhook.Secret{secret(t, batchSecret)}
			e := endpointOf(t, d)
			for i := range 2 { // the first one learns the offer
				m, key := order(), strconv.Itoa(i)
				m.Key, m.Attempt, m.Payload, m.Headers = &key, 1, []byte(payloadOf(key)), []byte(`{"X-Event-Token": "`+token+`"}`)
				v := e.Deliver(t.Context(), m, nil)
				if i == 1 && (!strings.Contains(v.Message, "bad token") || strings.Contains(v.Message, token)) {
					t.Errorf("%+v", v)
				}
			}
			testkit.Equal(t, "batches", len(b.batches), 1)
		})
	}
}
