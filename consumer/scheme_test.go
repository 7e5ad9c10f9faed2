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
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
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

func payment(e *receivertest.Env, body string, at time.Time) *http.Request {
	r := e.NewRequest("not this", body)
	t := strconv.FormatInt(at.Unix(), 10)
	r.Header.Set("Payment-Signature", "t="+t+",v1=00,v1="+timedSignature(t, body))
	return r
}

func TestSchemeOfTheSendersOwn(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		seen := make(chan consumer.Event, 1)
		e := receivertest.NewEnv(t, f, consumer.Config{Receiver: "test", Source: "bank", Verify: consumer.Verify{Custom: timedScheme}}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				seen <- consumer.EventFrom(r.Context())
				receivertest.Effect(e)(w, r)
			}
		})
		created := time.Now().Truncate(time.Second).UTC()
		body := func(amount int) string {
			return fmt.Sprintf(`{"id":"evt_1","type":"charge.paid","created":%d,"amount":%d}`, created.Unix(), amount)
		}
		receivertest.WantFirst(t, e.Do(payment(e, body(1), time.Now())), 201, `{"done":"evt_1"}`)
		// None of the headers is believed that a relay would send: this scheme covers none of them.
		want := consumer.Event{Receiver: "test", Source: "bank", Key: "evt_1", Type: "charge.paid", Version: 1, CreatedAt: created, Foreign: true, Payload: []byte(body(1))}
		if got := <-seen; !reflect.DeepEqual(got, want) {
			t.Errorf("event %+v, want %+v", got, want)
		}
		if report := e.WantResult(consumer.ResultProcessed); report.Event.Key != "evt_1" || report.Event.Payload != nil {
			t.Errorf("report %+v", report)
		}
		receivertest.WantReplayed(t, e.Do(payment(e, body(1), time.Now())), 201, "")
		receivertest.WantProblem(t, e.Do(payment(e, body(2), time.Now())), 422, "key-reused")
		e.WantRows("evt_1", 1, 1)
	})
}

func TestSchemeThatDoesNotVerify(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := unreachable(t, f, consumer.Config{Verify: consumer.Verify{Custom: timedScheme}})
		for name, change := range map[string]func(r *http.Request){
			"relay's signature": func(r *http.Request) { r.Header.Del("Payment-Signature") },
			"other time":        func(r *http.Request) { r.Header.Set("Payment-Signature", "t=1,v1="+timedSignature("2", "{}")) },
			"old":               func(r *http.Request) { r.Header.Set("Payment-Signature", "t=1,v1="+timedSignature("1", "{}")) },
		} {
			r := payment(e, "{}", time.Now())
			change(r)
			got := e.Do(r)
			receivertest.WantProblem(t, got, 401, "signature-invalid")
			report := e.WantResult(consumer.ResultRejected)
			if !errors.Is(report.Err, errScheme) || !reflect.DeepEqual(report.Event, consumer.Event{}) {
				t.Errorf("%s: report %+v", name, report)
			}
			log := e.Logged.String()
			if strings.Contains(got.Body, "matches") || strings.Contains(log, "canary") || !strings.Contains(log, "no signature matches") {
				t.Errorf("%s: answered %s, logged %s", name, got.Body, log)
			}
		}
	})
}

// Package headers tests the rules.
func TestSchemeWhoseEventIsInvalid(t *testing.T) {
	cases := map[string]consumer.Event{
		"Key": {}, "Type": {Key: "k", Type: "größe"}, "Version": {Key: "k", Version: 1 << 31},
		"": {Key: "k", Type: "t", Version: 1<<31 - 1, ID: 1, TraceState: strings.Repeat("x", 512)},
	}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for field, event := range cases {
			e := unreachable(t, f, consumer.Config{Verify: consumer.Verify{Custom: func(http.Header, []byte, time.Time) (consumer.Event, error) { return event, nil }}})
			got := e.Post("k", "{}")
			if field == "" {
				receivertest.WantProblem(t, got, 503, "database-unavailable")
				continue
			}
			receivertest.WantProblem(t, got, 400, "event-invalid")
			if report := e.WantResult(consumer.ResultRejected); !strings.Contains(got.Body, field) || !reflect.DeepEqual(report.Event, consumer.Event{}) {
				t.Errorf("%s does not name %s; report %+v", got.Body, field, report)
			}
		}
	})
}
