package consumer_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A receiver without a database answers 503 as soon as it needs one, so every other answer was
// given before.
func TestRefusedBeforeTheDatabaseIsTouched(t *testing.T) {
	const key = "invoice-1"
	replace := func(name string, values ...string) func(*http.Request) {
		return func(r *http.Request) { r.Header[http.CanonicalHeaderKey(name)] = values }
	}
	signedAt := func(d time.Duration, s webhook.Secret) func(*http.Request) {
		return func(r *http.Request) { webhook.Sign(r.Header, []byte("{}"), time.Now().Add(d), s) }
	}
	plain := func(id string) func(*http.Request) {
		return func(r *http.Request) { receivertest.SignPlain(t, r, id, "{}") }
	}
	strict, foreign := consumer.Config{}, consumer.Config{Verify: consumer.Verify{AcceptForeign: true}}
	unsigned, both := consumer.Config{Receiver: "test", Verify: consumer.Verify{AllowUnsigned: true}}, consumer.Config{Receiver: "logistics", Verify: consumer.Verify{AllowUnsigned: true, AcceptForeign: true}}
	cases := map[string]struct {
		cfg     consumer.Config
		change  func(*http.Request)
		status  int
		problem string
	}{
		"untouched":                   {strict, func(*http.Request) {}, 503, "database-unavailable"},
		"untouched, foreign accepted": {foreign, func(*http.Request) {}, 503, "database-unavailable"},

		"no key":               {strict, replace(webhook.IdempotencyKey), 400, "key-missing"},
		"empty key":            {strict, replace(webhook.IdempotencyKey, ""), 400, "key-missing"},
		"two keys":             {strict, replace(webhook.IdempotencyKey, key, "other"), 400, "key-repeated"},
		"the key twice":        {strict, replace(webhook.IdempotencyKey, key, key), 400, "key-repeated"},
		"two ids":              {strict, replace(webhook.ID, webhook.DeriveID(key), webhook.DeriveID(key)), 400, "key-repeated"},
		"no key and no id":     {foreign, func(r *http.Request) { replace(webhook.IdempotencyKey)(r); replace(webhook.ID)(r) }, 400, "key-missing"},
		"unsigned without key": {unsigned, replace(webhook.IdempotencyKey), 400, "key-missing"},
		"unsigned long key": {unsigned, func(r *http.Request) {
			replace(webhook.IdempotencyKey, strings.Repeat("k", 256))(r)
			replace(webhook.ID)(r)
		}, 400, "key-invalid"},
		"unsigned 8 KB key": {unsigned, func(r *http.Request) {
			replace(webhook.IdempotencyKey, strings.Repeat("k", 8<<10))(r)
			replace(webhook.ID)(r)
		}, 400, "key-invalid"},
		"unsigned latin-1 key":    {unsigned, func(r *http.Request) { replace(webhook.IdempotencyKey, "caf\xe9")(r); replace(webhook.ID)(r) }, 400, "key-invalid"},
		"unsigned Unicode key":    {unsigned, func(r *http.Request) { replace(webhook.IdempotencyKey, "café")(r); replace(webhook.ID)(r) }, 400, "key-invalid"},
		"unsigned, id of another": {unsigned, replace(webhook.ID, webhook.DeriveID("other")), 400, "key-conflict"},
		"unsigned, quoted key":    {unsigned, func(r *http.Request) { replace(webhook.IdempotencyKey, `"abc"`)(r); replace(webhook.ID)(r) }, 503, "database-unavailable"},
		"unsigned, id only":       {both, replace(webhook.IdempotencyKey), 503, "database-unavailable"},
		"signed long key": {strict, func(r *http.Request) {
			replace(webhook.IdempotencyKey, strings.Repeat("k", 256))(r)
			signedAt(0, receivertest.Secret())(r)
		}, 400, "key-invalid"},

		"another tenant":            {strict, replace("X-Event-Tenant", "b"), 401, "signature-invalid"},
		"a CloudEvents attribute":   {strict, replace("ce-type", "t"), 401, "signature-invalid"},
		"another destination":       {strict, replace(webhook.Destination, "mall"), 401, "signature-invalid"},
		"no signature":              {strict, replace(webhook.Signature), 401, "signature-invalid"},
		"two signature headers":     {strict, replace(webhook.Signature, "v1,AAAA", "v1,AAAA"), 401, "signature-invalid"},
		"no timestamp":              {strict, replace(webhook.Timestamp), 401, "signature-invalid"},
		"other secret":              {strict, signedAt(0, receivertest.OtherSecret()), 401, "signature-invalid"},
		"ten thousand signatures":   {strict, replace(webhook.Signature, strings.Repeat("v1,AAAA ", 10_000)), 401, "signature-invalid"},
		"other body":                {strict, func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(strings.NewReader("[]")), 2 }, 401, "signature-invalid"},
		"stale":                     {strict, signedAt(-6*time.Minute, receivertest.Secret()), 401, "timestamp-out-of-tolerance"},
		"from the future":           {strict, signedAt(6*time.Minute, receivertest.Secret()), 401, "timestamp-out-of-tolerance"},
		"stale for a short memory":  {consumer.Config{Verify: consumer.Verify{Tolerance: time.Minute}}, signedAt(-2*time.Minute, receivertest.Secret()), 401, "timestamp-out-of-tolerance"},
		"late for a long tolerance": {consumer.Config{Verify: consumer.Verify{Tolerance: time.Hour}}, signedAt(-30*time.Minute, receivertest.Secret()), 503, "database-unavailable"},
		"timestamp is no number":    {strict, replace(webhook.Timestamp, "1.5e9"), 401, "signature-invalid"},
		"timestamp overflows":       {strict, replace(webhook.Timestamp, "9223372036854775808"), 401, "signature-invalid"},
		"timestamp at the end":      {strict, replace(webhook.Timestamp, "-9223372036854775808"), 401, "timestamp-out-of-tolerance"},

		// A captured request, sent again under another name: v1 alone would verify all of these.
		"captured, other key":                {strict, replace(webhook.IdempotencyKey, "invoice-2"), 401, "signature-invalid"},
		"captured, other key, no x1":         {strict, func(r *http.Request) { replace(webhook.IdempotencyKey, "invoice-2")(r); stripX1(r) }, 401, "signature-invalid"},
		"captured, other type":               {strict, replace(webhook.EventType, "invoice.deleted"), 401, "signature-invalid"},
		"captured, one more header":          {strict, replace(webhook.Replay, "true"), 401, "signature-invalid"},
		"captured, a header missing":         {strict, replace(webhook.EventType), 401, "signature-invalid"},
		"captured, stripped of x1":           {strict, stripX1, 401, "signature-invalid"},
		"foreign accepted, other key":        {foreign, replace(webhook.IdempotencyKey, "invoice-2"), 401, "signature-invalid"},
		"foreign accepted, without key":      {foreign, replace(webhook.IdempotencyKey), 401, "signature-invalid"},
		"foreign accepted, other type":       {foreign, replace(webhook.EventType, "invoice.deleted"), 401, "signature-invalid"},
		"foreign accepted, stripped of x1":   {foreign, stripX1, 401, "signature-invalid"},
		"foreign accepted, id made derived":  {foreign, plain("evt_0123456789abcdef0123456789abcdef"), 401, "signature-invalid"},
		"foreign accepted, id with dot":      {foreign, plain("msg.1"), 401, "signature-invalid"},
		"foreign accepted, long id":          {foreign, plain("msg_" + strings.Repeat("x", 255)), 400, "key-invalid"},
		"foreign":                            {foreign, plain("msg_1"), 503, "database-unavailable"},
		"foreign sender, but not accepted":   {strict, plain("msg_1"), 401, "signature-invalid"},
		"foreign sender without its own key": {foreign, func(r *http.Request) { r.Header.Del(webhook.IdempotencyKey); plain("msg_1")(r) }, 503, "database-unavailable"},

		"version is no number": {strict, resigned(webhook.EventVersion, "two"), 400, "header-invalid"},
		"version overflows":    {strict, resigned(webhook.EventVersion, "4294967296"), 400, "header-invalid"},
		"negative sequence":    {strict, resigned(webhook.Sequence, "-1"), 400, "header-invalid"},
		"no time":              {strict, resigned(webhook.NotAfter, "tomorrow"), 400, "header-invalid"},
		"type is not ASCII":    {strict, resigned(webhook.EventType, "größe"), 400, "header-invalid"},
		"type twice":           {strict, resigned(webhook.EventType, "a", "b"), 400, "header-invalid"},
		"type is empty":        {strict, resigned(webhook.EventType, ""), 503, "database-unavailable"},

		"too large":          {consumer.Config{Limits: consumer.Limits{MaxBodyBytes: 1}}, func(*http.Request) {}, 413, "body-too-large"},
		"too large, chunked": {consumer.Config{Limits: consumer.Limits{MaxBodyBytes: 1}}, func(r *http.Request) { r.ContentLength = -1 }, 413, "body-too-large"},
		"just small enough":  {consumer.Config{Limits: consumer.Limits{MaxBodyBytes: 2}}, func(*http.Request) {}, 503, "database-unavailable"},
		"GET":                {strict, func(r *http.Request) { r.Method = http.MethodGet; replace(webhook.IdempotencyKey)(r) }, 400, "key-missing"},
	}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, c := range cases {
			// Its server ends with the outer test: net/http keeps the connection of a refused
			// request for half a second.
			e := *unreachable(t, f, c.cfg)
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e.T = t
				r := e.NewRequest(key, "{}")
				c.change(r)
				receivertest.WantProblem(t, e.Do(r), c.status, c.problem)
				want := consumer.ResultRejected
				if c.status == 503 {
					want = consumer.ResultUnavailable
				}
				if report := e.WantResult(want); reflect.DeepEqual(report.Event, consumer.Event{}) != (want == consumer.ResultRejected) || report.Err == nil {
					t.Errorf("report %+v", report)
				}
			})
		}
	})
}

func stripX1(r *http.Request) {
	var v1 []string
	for entry := range strings.FieldsSeq(r.Header.Get(webhook.Signature)) {
		if strings.HasPrefix(entry, "v1,") {
			v1 = append(v1, entry)
		}
	}
	r.Header.Set(webhook.Signature, strings.Join(v1, " "))
}

// resigned is a sender that has the secret and yet writes a header as it must not.
func resigned(name string, values ...string) func(*http.Request) {
	return func(r *http.Request) {
		r.Header[http.CanonicalHeaderKey(name)] = values
		webhook.Sign(r.Header, []byte("{}"), time.Now(), receivertest.Secret())
	}
}

func TestForeignSenderIsKnownByItsIDOnly(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		seen := make(chan consumer.Event, 1)
		e := receivertest.NewEnv(t, f, consumer.Config{Verify: consumer.Verify{AcceptForeign: true}}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				for name := range r.Header {
					if webhook.Covered(name) {
						t.Errorf("%s reaches the handler", name)
					}
				}
				seen <- consumer.EventFrom(r.Context())
				receivertest.Effect(e)(w, r)
			}
		})
		send := func(key string) receivertest.Response {
			// None of the headers that a relay's signature covers is covered by what follows.
			r := e.NewRequest(key, "{}", receivertest.SentTo("shop"), receivertest.With("X-Event-Tenant", "a"), receivertest.With("ce-type", "t"))
			receivertest.SignPlain(t, r, "msg_1", "{}")
			return e.Do(r)
		}
		receivertest.WantFirst(t, send("a"), 201, `{"done":"msg_1"}`)
		if got, want := <-seen, (consumer.Event{Receiver: "test", Source: "outbox", IdempotencyKey: "msg_1", Version: 1, Foreign: true, Payload: []byte("{}")}); !reflect.DeepEqual(got, want) {
			t.Errorf("event %+v, want %+v", got, want)
		}
		receivertest.WantReplayed(t, send("b"), 201, "")
		e.WantRows("msg_1", 1, 1)
	})
}

func TestRotationRefusesNothing(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{Receiver: "test", Secrets: []string{receivertest.OtherText, receivertest.SecretText}}, receivertest.Effect)
		for key, secrets := range map[string][]webhook.Secret{"old": {receivertest.Secret()}, "new": {receivertest.OtherSecret()}, "both": {receivertest.OtherSecret(), receivertest.Secret()}} {
			r := e.NewRequest(key, "{}")
			webhook.Sign(r.Header, []byte("{}"), time.Now(), secrets...)
			receivertest.WantFirst(t, e.Do(r), 201, `{"done":"`+key+`"}`)
		}
	})
}

// A body that breaks off must not be answered with a status on which the relay gives the event up.
func TestBrokenBodyMayComeAgain(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := unreachable(t, f, consumer.Config{})
		r := e.NewRequest("k", "{}")
		r.Body, r.ContentLength = io.NopCloser(io.MultiReader(strings.NewReader("{"), failingReader{})), 2
		_, _ = e.Try(r) // the client's own transport reports that the body failed
		if report := e.WantResult(consumer.ResultRejected); report.Status != http.StatusRequestTimeout {
			t.Errorf("report %+v", report)
		}
	})
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// No secret and no payload may reach a log, whatever goes wrong.
func TestLogsHoldNoSecrets(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := unreachable(t, f, consumer.Config{})
		e.Post("k", `{"canary":"payload"}`)
		bad := e.NewRequest("k", `{"canary":"payload"}`)
		bad.Header.Set(webhook.Signature, "v1,Y2FuYXJ5")
		e.Do(bad)
		log := e.Logged.String()
		for _, canary := range []string{"canary", "Y2FuYXJ5", strings.TrimPrefix(receivertest.SecretText, "whsec_"), "outbox-relay-test-secret"} {
			if strings.Contains(log, canary) {
				t.Errorf("the log holds %q: %s", canary, log)
			}
		}
		testkit.Contains(t, "logged", log, "result=unavailable", "result=rejected")
	})
}

const schemeSecret = "sk_scheme_canary"

var errScheme = errors.New("no signature matches; Authorization: Bearer " + schemeSecret)

// timedScheme is how some payment providers sign: "t=<seconds>,v1=<hex HMAC of seconds.body>", one
// v1 for each secret.
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
	return consumer.Event{IdempotencyKey: payload.ID, Type: payload.Type, CreatedAt: time.Unix(payload.Created, 0).UTC(), Payload: []byte("not the body")}, nil
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
		want := consumer.Event{Receiver: "test", Source: "bank", IdempotencyKey: "evt_1", Type: "charge.paid", Version: 1, CreatedAt: created, Foreign: true, Payload: []byte(body(1))}
		if got := <-seen; !reflect.DeepEqual(got, want) {
			t.Errorf("event %+v, want %+v", got, want)
		}
		if report := e.WantResult(consumer.ResultProcessed); report.Event.IdempotencyKey != "evt_1" || report.Event.Payload != nil {
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
		"IdempotencyKey": {}, "Type": {IdempotencyKey: "k", Type: "größe"}, "Version": {IdempotencyKey: "k", Version: 1 << 31},
		"": {IdempotencyKey: "k", Type: "t", Version: 1<<31 - 1, ID: 1, TraceState: strings.Repeat("x", 512)},
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
