package webhook

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// The vector that the libraries of Standard Webhooks test themselves with.
const (
	vectorSecret    = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	vectorID        = "msg_p5jXN8AQM9LWM0D4loKWxJek"
	vectorTime      = 1614265330
	vectorPayload   = `{"test": 2432232314}`
	vectorSignature = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
)

// wrongSignature is of another text.
const wrongSignature = "v1,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc="

func reference(t testing.TB, secret string) *standardwebhooks.Webhook {
	t.Helper()
	webhook, err := standardwebhooks.NewWebhook(secret)
	testkit.Must(t, err)
	return webhook
}

// signedByReference is a request of any Standard Webhooks sender.
func signedByReference(t testing.TB, secret, id string, at time.Time, body string) http.Header {
	t.Helper()
	signature, err := reference(t, secret).Sign(id, at, []byte(body))
	testkit.Must(t, err)
	return http.Header{ID: {id}, Timestamp: {strconv.FormatInt(at.Unix(), 10)}, Signature: {signature}}
}

func TestReferenceVector(t *testing.T) {
	t.Parallel()
	testkit.Equal(t, "got", "v1,"+encode(signV1(mustParse(t, vectorSecret), vectorID, strconv.Itoa(vectorTime), []byte(vectorPayload))), vectorSignature)
	h := http.Header{ID: {vectorID}, Timestamp: {strconv.Itoa(vectorTime)}, Signature: {vectorSignature}}
	if got, err := Verify(h, []byte(vectorPayload), time.Unix(vectorTime, 0), 5*time.Minute, mustParse(t, vectorSecret)); got != VerifiedV1 || err != nil {
		t.Errorf("got %v, %v", got, err)
	}
}

// Every case is judged by the reference library as well. Where a receiver must be stricter, strict
// says why it is.
func TestTheirSignerOurVerifier(t *testing.T) {
	t.Parallel()
	const tolerance = 5 * time.Minute
	now := time.Unix(vectorTime, 0)
	set := func(name, value string) func(http.Header) {
		return func(h http.Header) { h.Set(name, value) }
	}
	signatures := func(format string) func(http.Header) { // %s is the right one
		return func(h http.Header) { h.Set(Signature, strings.ReplaceAll(format, "%s", h.Get(Signature))) }
	}
	cases := map[string]struct {
		change  func(http.Header)
		payload string
		secrets string
		now     time.Time
		want    error
		strict  string
	}{
		"valid":                      {},
		"id missing":                 {change: func(h http.Header) { h.Del(ID) }, want: ErrUnsigned},
		"timestamp missing":          {change: func(h http.Header) { h.Del(Timestamp) }, want: ErrUnsigned},
		"signature missing":          {change: func(h http.Header) { h.Del(Signature) }, want: ErrUnsigned},
		"signature of another text":  {change: set(Signature, wrongSignature), want: ErrSignature},
		"version without signature":  {change: set(Signature, "v1,"), want: ErrSignature},
		"signature without version":  {change: func(h http.Header) { h.Set(Signature, h.Get(Signature)[len("v1,"):]) }, want: ErrSignature},
		"another version":            {change: func(h http.Header) { h.Set(Signature, "v2"+h.Get(Signature)[len("v1"):]) }, want: ErrSignature},
		"the asymmetric version":     {change: func(h http.Header) { h.Set(Signature, "v1a"+h.Get(Signature)[len("v1"):]) }, want: ErrSignature},
		"version in capitals":        {change: func(h http.Header) { h.Set(Signature, "V1"+h.Get(Signature)[len("v1"):]) }, want: ErrSignature},
		"our other version":          {change: func(h http.Header) { h.Set(Signature, "x1"+h.Get(Signature)[len("v1"):]) }, want: ErrSignature},
		"one of several":             {change: signatures(wrongSignature + " v2,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc= %s " + wrongSignature)},
		"the last of ten thousand":   {change: signatures(strings.Repeat(wrongSignature+" ", 9_999) + "%s")},
		"the first of ten thousand":  {change: signatures("%s" + strings.Repeat(" "+wrongSignature, 9_999))},
		"ten thousand, none right":   {change: signatures(strings.TrimSpace(strings.Repeat(wrongSignature+" ", 10_000))), want: ErrSignature},
		"ten thousand of versions":   {change: signatures(strings.Repeat("v9,x ", 9_999) + "%s")},
		"other id":                   {change: set(ID, "msg_q5jXN8AQM9LWM0D4loKWxJek"), want: ErrSignature},
		"other timestamp":            {change: set(Timestamp, strconv.Itoa(vectorTime+1)), want: ErrSignature},
		"other payload":              {payload: `{"test": 2432232315}`, want: ErrSignature},
		"payload written otherwise":  {payload: `{"test":2432232314}`, want: ErrSignature},
		"other secret":               {secrets: newText, want: ErrSignature},
		"rotated, new secret first":  {secrets: newText + "," + vectorSecret},
		"rotated, new secret last":   {secrets: vectorSecret + "," + newText},
		"five minutes old":           {now: now.Add(tolerance)},
		"a second older":             {now: now.Add(tolerance + time.Second), want: ErrTooOld},
		"five minutes ahead":         {now: now.Add(-tolerance)},
		"a second further ahead":     {now: now.Add(-tolerance - time.Second), want: ErrTooNew},
		"years old":                  {now: now.AddDate(10, 0, 0), want: ErrTooOld},
		"timestamp with a fraction":  {change: set(Timestamp, "1614265330.0"), want: ErrTimestamp},
		"timestamp is no number":     {change: set(Timestamp, "yesterday"), want: ErrTimestamp},
		"signature written as a URL": {change: func(h http.Header) { h.Set(Signature, strings.ReplaceAll(h.Get(Signature), "+", "-")) }, want: ErrSignature},
		"signature without padding":  {change: func(h http.Header) { h.Set(Signature, strings.TrimRight(h.Get(Signature), "=")) }, want: ErrSignature},
		"dot moved out of the id":    {change: set(ID, vectorID+"."), want: ErrID},
		"more after a comma":         {change: signatures("%s,more"), want: ErrSignature, strict: "an entry is a version and a signature"},
		"id repeated":                {change: func(h http.Header) { h.Add(ID, "msg_2") }, want: ErrUnsigned, strict: "others may take the second"},
		"signature repeated":         {change: func(h http.Header) { h.Add(Signature, wrongSignature) }, want: ErrUnsigned, strict: "others may take the second"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := signedByReference(t, vectorSecret, vectorID, now, vectorPayload)
			if c.change != nil {
				c.change(h)
			}
			at, payload, secrets := now, vectorPayload, vectorSecret
			if !c.now.IsZero() {
				at = c.now
			}
			if c.payload != "" {
				payload = c.payload
			}
			if c.secrets != "" {
				secrets = c.secrets
			}
			parsed, err := ParseSecrets(secrets)
			testkit.Must(t, err)
			got, err := Verify(h, []byte(payload), at, tolerance, parsed...)
			if err != c.want || (err == nil) != (got == VerifiedV1) {
				t.Errorf("got %v, %v; want %v", got, err, c.want)
			}
			// The reference takes the time of the day, so its judgement of age is asked for in the
			// table below.
			theirs := false
			for secret := range strings.SplitSeq(secrets, ",") {
				theirs = theirs || reference(t, secret).VerifyIgnoringTimestamp([]byte(payload), h) == nil
			}
			aged := errors.Is(c.want, ErrTooOld) || errors.Is(c.want, ErrTooNew)
			if want := c.want == nil || aged || c.strict != ""; theirs != want {
				t.Errorf("the reference verifies: %v, want %v", theirs, want)
			}
		})
	}
}

// The clocks: both judge a request of now, and of so long ago or ahead. A minute beside the edge,
// because the reference reads the clock itself.
func TestBothToleratesFiveMinutes(t *testing.T) {
	t.Parallel()
	for age, want := range map[time.Duration]bool{
		0: true, 4 * time.Minute: true, -4 * time.Minute: true, 6 * time.Minute: false, -6 * time.Minute: false, 24 * time.Hour: false,
	} {
		now := time.Now()
		h := signedByReference(t, vectorSecret, vectorID, now.Add(-age), vectorPayload)
		_, err := Verify(h, []byte(vectorPayload), now, 5*time.Minute, mustParse(t, vectorSecret))
		theirs := reference(t, vectorSecret).Verify([]byte(vectorPayload), h)
		if (err == nil) != want || (theirs == nil) != want {
			t.Errorf("%v old: %v; the reference %v", age, err, theirs)
		}
	}
}

func TestOurSignerTheirVerifier(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		signs, receives string
		change          func(http.Header)
		body            string
		want            bool
	}{
		"one secret":                 {signs: vectorSecret, receives: vectorSecret, want: true},
		"rotating, receiver has old": {signs: newText + "," + vectorSecret, receives: vectorSecret, want: true},
		"rotating, receiver has new": {signs: vectorSecret + "," + newText, receives: newText, want: true},
		"another secret":             {signs: newText, receives: vectorSecret},
		"unsigned":                   {signs: "", receives: vectorSecret},
		"another body":               {signs: vectorSecret, receives: vectorSecret, body: "{}"},
		"another id":                 {signs: vectorSecret, receives: vectorSecret, change: func(h http.Header) { h.Set(ID, DeriveID("k2")) }},
		"another timestamp": {signs: vectorSecret, receives: vectorSecret, change: func(h http.Header) {
			h.Set(Timestamp, strconv.FormatInt(time.Now().Unix()-1, 10))
		}},
		"x1 taken away":          {signs: vectorSecret, receives: vectorSecret, change: func(h http.Header) { v1, _, _ := strings.Cut(h.Get(Signature), " "); h.Set(Signature, v1) }, want: true},
		"v1 taken away":          {signs: vectorSecret, receives: vectorSecret, change: func(h http.Header) { _, x1, _ := strings.Cut(h.Get(Signature), " "); h.Set(Signature, x1) }},
		"among ten thousand":     {signs: vectorSecret, receives: vectorSecret, change: func(h http.Header) { h.Set(Signature, strings.Repeat("v1,x ", 9_999)+h.Get(Signature)) }, want: true},
		"key that v1 leaves out": {signs: vectorSecret, receives: vectorSecret, change: func(h http.Header) { h.Set(IdempotencyKey, "k2") }, want: true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			secrets, err := ParseSecrets(c.signs)
			testkit.Must(t, err)
			h := relayHeader("k")
			Sign(h, []byte(vectorPayload), time.Now(), secrets...)
			if c.change != nil {
				c.change(h)
			}
			body := vectorPayload
			if c.body != "" {
				body = c.body
			}
			if err := reference(t, c.receives).Verify([]byte(body), h); (err == nil) != c.want {
				t.Errorf("the reference: %v, want %v", err, c.want)
			}
		})
	}
}

// A header of ten thousand signatures costs no more memory than one of one: so its cost is what it
// takes to read it once. Not in parallel with anything, because allocations are counted for the
// whole process.
func TestManySignaturesCostNothingEach(t *testing.T) {
	now := time.Unix(vectorTime, 0)
	allocations := func(n int) float64 {
		h := signedByReference(t, vectorSecret, vectorID, now, vectorPayload)
		h.Set(Signature, strings.Repeat(wrongSignature+" x1"+wrongSignature[2:]+" ", n)+h.Get(Signature))
		body, secrets := []byte(vectorPayload), []Secret{mustParse(t, newText), mustParse(t, vectorSecret)}
		return testing.AllocsPerRun(10, func() {
			if got, err := Verify(h, body, now, time.Minute, secrets...); got != VerifiedV1 || err != nil {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
	if few, many := allocations(1), allocations(5_000); many > few {
		t.Errorf("%v allocations for two signatures, %v for ten thousand", few, many)
	}
}

// BenchmarkVerify shows that the cost of a header grows as its length does.
func BenchmarkVerify(b *testing.B) {
	now := time.Unix(vectorTime, 0)
	for _, n := range []int{1, 10_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			h := signedByReference(b, vectorSecret, vectorID, now, vectorPayload)
			h.Set(Signature, strings.Repeat(wrongSignature+" ", n-1)+h.Get(Signature))
			secret := mustParse(b, vectorSecret)
			for b.Loop() {
				if _, err := Verify(h, []byte(vectorPayload), now, time.Minute, secret); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/signature")
		})
	}
}

// FuzzReference lets both libraries judge the same request by v1. Whatever the one takes, the other
// takes, except where the standard leaves a choice and this package is stricter.
func FuzzReference(f *testing.F) {
	now := time.Unix(vectorTime, 0)
	f.Add(vectorID, strconv.Itoa(vectorTime), vectorSignature, []byte(vectorPayload))
	f.Add(vectorID, strconv.Itoa(vectorTime), wrongSignature+" "+vectorSignature, []byte(vectorPayload))
	f.Add(vectorID, "+"+strconv.Itoa(vectorTime), vectorSignature, []byte(vectorPayload))
	f.Add(vectorID, strconv.Itoa(vectorTime), "v1, v1 ,v1,, "+vectorSignature+",", []byte(vectorPayload))
	f.Add("a.b", "0", "v1a,x", []byte{})
	secret, theirs := mustParse(f, vectorSecret), reference(f, vectorSecret)
	f.Fuzz(func(t *testing.T, id, timestamp, signature string, body []byte) {
		h := http.Header{ID: {id}, Timestamp: {timestamp}, Signature: {signature}}
		_, err := Verify(h, body, now, 5*time.Minute, secret)
		reference := theirs.VerifyIgnoringTimestamp(body, h)
		if err == nil {
			if id != vectorID || timestamp != strconv.Itoa(vectorTime) || string(body) != vectorPayload {
				t.Errorf("forged: id %q, timestamp %q, body %q", id, timestamp, body)
			}
			if reference != nil && !strings.ContainsFunc(signature, func(r rune) bool { return r != ' ' && strings.TrimSpace(string(r)) == "" }) {
				t.Errorf("the reference refuses it: %v", reference)
			}
			return
		}
		if reference == nil && !errors.Is(err, ErrTooOld) && !errors.Is(err, ErrTooNew) && !errors.Is(err, ErrID) &&
			!strings.Contains(signature, vectorSignature+",") && timestamp == strconv.Itoa(vectorTime) {
			t.Errorf("refused what the reference takes: %v: id %q, signature %q", err, id, signature)
		}
	})
}
