package consumer_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

const schemeSecret = "sk_scheme_canary"

var errScheme = errors.New("no signature matches; Authorization: Bearer " + schemeSecret)

// timedScheme is how some payment providers sign: "t=<seconds>,v1=<hex HMAC of seconds.body>", one v1 for each secret.
func timedScheme(header http.Header, body []byte, now time.Time) (consumer.Event, error) {
	var at string
	var signatures []string
	for part := range strings.SplitSeq(header.Get("Payment-Signature"), ",") {
		switch name, value, _ := strings.Cut(part, "="); name {
		case "t":
			at = value
		case "v1":
			signatures = append(signatures, value)
		}
	}
	seconds, err := strconv.ParseInt(at, 10, 64)
	if err != nil || now.Sub(time.Unix(seconds, 0)).Abs() > 5*time.Minute {
		return consumer.Event{}, errScheme
	}
	proven := false
	for _, signature := range signatures {
		proven = hmac.Equal([]byte(signature), []byte(timedSignature(at, string(body)))) || proven
	}
	if !proven {
		return consumer.Event{}, errScheme
	}
	var payload struct {
		ID, Type string
		Created  int64
	}
	if err := json.Unmarshal(body, &payload); err != nil {
		return consumer.Event{}, err
	}
	return consumer.Event{Key: payload.ID, Type: payload.Type, CreatedAt: time.Unix(payload.Created, 0).UTC(), Payload: []byte("not the body")}, nil
}

func timedSignature(at, body string) string {
	mac := hmac.New(sha256.New, []byte(schemeSecret))
	mac.Write([]byte(at + "." + body))
	return hex.EncodeToString(mac.Sum(nil))
}

func (e *env) payment(body string, at time.Time) *http.Request {
	r := e.newRequest("not this", body)
	t := strconv.FormatInt(at.Unix(), 10)
	r.Header.Set("Payment-Signature", "t="+t+",v1=00,v1="+timedSignature(t, body))
	return r
}

func TestSchemeOfTheSendersOwn(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		seen := make(chan consumer.Event, 1)
		e := newEnv(t, f, consumer.Config{Receiver: "test", Source: "bank", Verify: timedScheme}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				seen <- consumer.EventFrom(r.Context())
				effect(e)(w, r)
			}
		})
		created := time.Now().Truncate(time.Second).UTC()
		body := func(amount int) string {
			return fmt.Sprintf(`{"id":"evt_1","type":"charge.paid","created":%d,"amount":%d}`, created.Unix(), amount)
		}
		wantFirst(t, e.do(e.payment(body(1), time.Now())), 201, `{"done":"evt_1"}`)
		// None of the headers is believed that a relay would send: this scheme covers none of them.
		want := consumer.Event{Receiver: "test", Source: "bank", Key: "evt_1", Type: "charge.paid", Version: 1, CreatedAt: created, Foreign: true, Payload: []byte(body(1))}
		if got := <-seen; !reflect.DeepEqual(got, want) {
			t.Errorf("event %+v, want %+v", got, want)
		}
		if report := e.wantResult(consumer.ResultProcessed); report.Event.Key != "evt_1" || report.Event.Payload != nil {
			t.Errorf("report %+v", report)
		}
		wantReplayed(t, e.do(e.payment(body(1), time.Now())), 201, "")
		wantProblem(t, e.do(e.payment(body(2), time.Now())), 422, "key-reused")
		e.wantRows("evt_1", 1, 1)
	})
}

func TestSchemeThatDoesNotVerify(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := unreachable(t, f, consumer.Config{Verify: timedScheme})
		for name, change := range map[string]func(r *http.Request){
			"relay's signature": func(r *http.Request) { r.Header.Del("Payment-Signature") },
			"other time":        func(r *http.Request) { r.Header.Set("Payment-Signature", "t=1,v1="+timedSignature("2", "{}")) },
			"old":               func(r *http.Request) { r.Header.Set("Payment-Signature", "t=1,v1="+timedSignature("1", "{}")) },
		} {
			r := e.payment("{}", time.Now())
			change(r)
			got := e.do(r)
			wantProblem(t, got, 401, "signature-invalid")
			report := e.wantResult(consumer.ResultRejected)
			if !errors.Is(report.Err, errScheme) || !reflect.DeepEqual(report.Event, consumer.Event{}) {
				t.Errorf("%s: report %+v", name, report)
			}
			log := e.logged.String()
			if strings.Contains(got.body, "matches") || strings.Contains(log, "canary") || !strings.Contains(log, "no signature matches") {
				t.Errorf("%s: answered %s, logged %s", name, got.body, log)
			}
		}
	})
}

func TestSchemeWhoseEventIsInvalid(t *testing.T) {
	long := strings.Repeat("x", 256)
	cases := map[string]struct {
		event consumer.Event
		field string
	}{
		"no key":         {consumer.Event{}, "Key"},
		"long key":       {consumer.Event{Key: long}, "Key"},
		"key on 2 lines": {consumer.Event{Key: "a\nb"}, "Key"},
		"type":           {consumer.Event{Key: "k", Type: "größe"}, "Type"},
		"reference":      {consumer.Event{Key: "k", RelatedReference: long}, "RelatedReference"},
		"ordering key":   {consumer.Event{Key: "k", OrderingKey: "\x00"}, "OrderingKey"},
		"delivery":       {consumer.Event{Key: "k", DeliveryID: "\x7f"}, "DeliveryID"},
		"trace parent":   {consumer.Event{Key: "k", TraceParent: "\x00"}, "TraceParent"},
		"trace state":    {consumer.Event{Key: "k", TraceState: strings.Repeat("x", 513)}, "TraceState"},
		"version":        {consumer.Event{Key: "k", Version: -1}, "Version"},
		"large version":  {consumer.Event{Key: "k", Version: 1 << 31}, "Version"},
		"attempt":        {consumer.Event{Key: "k", Attempt: -1}, "Attempt"},
		"id":             {consumer.Event{Key: "k", ID: -1}, "ID"},
		"sequence":       {consumer.Event{Key: "k", Sequence: -1}, "Sequence"},
		"created":        {consumer.Event{Key: "k", CreatedAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, "CreatedAt"},
		"not after":      {consumer.Event{Key: "k", NotAfter: time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC)}, "NotAfter"},
		"valid":          {consumer.Event{Key: "k", Type: "t", Version: 1<<31 - 1, ID: 1, TraceState: strings.Repeat("x", 512)}, ""},
	}
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 4)
				t.Parallel()
				e := unreachable(t, f, consumer.Config{Verify: func(http.Header, []byte, time.Time) (consumer.Event, error) { return c.event, nil }})
				got := e.post("k", "{}")
				if c.field == "" {
					wantProblem(t, got, 503, "database-unavailable")
					return
				}
				wantProblem(t, got, 400, "event-invalid")
				if report := e.wantResult(consumer.ResultRejected); !strings.Contains(got.body, c.field) || !reflect.DeepEqual(report.Event, consumer.Event{}) {
					t.Errorf("%s does not name %s; report %+v", got.body, c.field, report)
				}
			})
		}
	})
}
