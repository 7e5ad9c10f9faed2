package storetest

import (
	"net/http"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

func firstThenDuplicates(w *world) {
	one := w.receiver(store.Config{}, w.works)
	two := w.receiver(store.Config{}, w.works)
	first := one.post("k", `{"n":1}`)
	w.wantFirst(first, http.StatusCreated, done("k"))
	one.wantResult(consumer.ResultProcessed)
	for _, rc := range []*receiver{one, two, one} {
		again := rc.post("k", `{"n":1}`)
		w.wantReplayed(again, http.StatusCreated)
		if report := rc.wantResult(consumer.ResultDuplicate); report.Event.Key != "k" || report.Err != nil {
			w.Errorf("report %+v", report)
		}
	}
	w.wantEffects("k", 1, 1)
}

func keptAnswers(w *world) {
	cases := map[string]struct {
		handler http.HandlerFunc
		status  int
		body    string // of the first answer; a duplicate's has none
	}{
		"no content":      {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, 204, ""},
		"second header":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(202); w.WriteHeader(500) }, 202, ""},
		"of the margin":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(299) }, 299, ""},
		"bytes, not text": {func(w http.ResponseWriter, _ *http.Request) { write(w, "\x00\xff\xfe\r\n") }, 200, "\x00\xff\xfe\r\n"},
	}
	rc := w.receiver(store.Config{}, func(out http.ResponseWriter, r *http.Request) {
		out.Header().Set("X-Handler", "ran")
		cases[consumer.EventFrom(r.Context()).Key].handler(out, r)
	})
	for name, c := range cases {
		w.wantFirst(rc.post(name, "{}"), c.status, c.body)
		again := rc.post(name, "{}")
		w.wantReplayed(again, c.status)
		if got := again.header.Get("X-Handler"); got != "" {
			w.Errorf("%s: a header of the first answer comes again: %q", name, got)
		}
	}
}

func anotherBody(w *world) {
	rc := w.receiver(store.Config{}, w.works)
	rc.post("k", `{"amount":1}`)
	rc.wantResult(consumer.ResultProcessed)
	for _, body := range []string{`{"amount":2}`, ``, `{"amount":1} `} {
		w.wantProblem(rc.post("k", body), http.StatusUnprocessableEntity, "key-reused")
		rc.wantResult(consumer.ResultKeyReused)
	}
	w.wantReplayed(rc.post("k", `{"amount":1}`), http.StatusCreated)
	w.wantEffects("k", 1, 1)
}

func keysOfEveryForm(w *world) {
	var all strings.Builder
	for c := byte(' ') + 1; c < '~'; c++ {
		all.WriteByte(c)
	}
	rc := w.receiver(store.Config{}, w.works)
	keys := []string{
		all.String(), strings.Repeat("k", 255), strings.Repeat("k", 254), "{a}", "{b}", "a b", "a  b", "A B", "%00", `\n`, "*", "'; --",
		"null", "0", "00", "a:b", "a:", "a", "a/../b", "$ref", "#key", ":token",
	}
	for _, key := range keys {
		w.wantFirst(rc.post(key, "{}"), http.StatusCreated, done(key))
	}
	for _, key := range keys {
		w.wantReplayed(rc.post(key, "{}"), http.StatusCreated)
		w.wantEffects(key, 1, 1)
	}
}

// Sources and keys must not run together: neither ("a:b", "c") with ("a", "b:c"), nor ("a", "b") with ("ab", "").
func sourcesApart(w *world) {
	for i, name := range [][2]string{
		{"a", "b:c"},
		{"a:b", "c"},
		{"a", "b"},
		{"a:", "b"},
		{"a", ":b"},
		{"a%3A", "b"},
		{"A", "b"},
		{"a b", "c"},
		{"a+b", "c"},
		{"a", "b c"},
		{"finance", "k"},
		{"stock", "k"},
	} {
		rc := w.receiver(store.Config{Config: consumer.Config{Receiver: "logistics", Source: name[0]}}, func(out http.ResponseWriter, _ *http.Request) {
			out.WriteHeader(210 + i)
		})
		w.wantFirst(rc.post(name[1], "{}"), 210+i, "")
		w.wantReplayed(rc.post(name[1], "{}"), 210+i)
	}
}

// A memory with a TTL cannot know what it has forgotten, and judges by the event's age. The database notes what it removed.
func olderThanMemory(w *world) {
	const ttl = time.Hour
	rc := w.receiver(store.Config{TTL: ttl}, w.works)
	created := func(ago time.Duration) func(http.Header) {
		return with(webhook.CreatedAt, time.Now().Add(-ago).UTC().Format(time.RFC3339Nano))
	}
	w.wantFirst(rc.do(rc.request("known", "{}", created(0))), 201, done("known"))
	w.wantFirst(rc.do(rc.request("young", "{}", created(ttl/2))), 201, done("young"))
	rc.wantResult(consumer.ResultProcessed)
	rc.wantResult(consumer.ResultProcessed)
	if w.atomic() {
		w.wantFirst(rc.do(rc.request("old", "{}", created(2*ttl))), 201, done("old"))
		rc.wantResult(consumer.ResultProcessed)
	} else {
		w.wantProblem(rc.do(rc.request("old", "{}", created(2*ttl))), http.StatusUnprocessableEntity, "forgotten")
		rc.wantResult(consumer.ResultForgotten)
		w.wantEffects("old", 0, 0)
		// The refusal has left no claim behind.
		w.wantFirst(rc.do(rc.request("old", "{}", created(0))), 201, done("old"))
		rc.wantResult(consumer.ResultProcessed)
	}
	w.wantReplayed(rc.do(rc.request("known", "{}", created(2*ttl))), 201)
	rc.wantResult(consumer.ResultDuplicate)

	over := with(webhook.NotAfter, time.Now().Add(-ttl).UTC().Format(time.RFC3339))
	w.wantProblem(rc.do(rc.request("over", "{}", over)), http.StatusUnprocessableEntity, "forgotten")
	rc.wantResult(consumer.ResultForgotten)
	w.wantReplayed(rc.do(rc.request("known", "{}", over)), 201)
}
