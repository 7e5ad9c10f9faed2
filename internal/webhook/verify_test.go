package webhook

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A request that was captured on its way and sent again with any covered header changed is no
// relay's request any more. The v1 in it still matches, and must prove no more than it covers.
func TestX1BindsTheHeaders(t *testing.T) {
	t.Parallel()
	secret, body, now := mustParse(t, oldText), []byte(`{"n":1}`), time.Now()
	onlyX1 := func(h http.Header) {
		_, x1, _ := strings.Cut(h.Get(Signature), " ")
		h.Set(Signature, x1)
	}
	onlyV1 := func(h http.Header) {
		v1, _, _ := strings.Cut(h.Get(Signature), " ")
		h.Set(Signature, v1)
	}
	cases := map[string]struct {
		change func(http.Header)
		want   Verified
		err    error
	}{
		"nothing":                {func(http.Header) {}, VerifiedX1, nil},
		"uncovered header":       {func(h http.Header) { h.Set("Content-Type", "text/plain") }, VerifiedX1, nil},
		"blanks a proxy strips":  {func(h http.Header) { h.Set(EventType, " invoice.created\t") }, VerifiedX1, nil},
		"x1 alone":               {onlyX1, VerifiedX1, nil},
		"other key":              {func(h http.Header) { h.Set(IdempotencyKey, "k2") }, VerifiedV1, nil},
		"key twice":              {func(h http.Header) { h.Add(IdempotencyKey, "k2") }, VerifiedV1, nil},
		"key gone":               {func(h http.Header) { h.Del(IdempotencyKey) }, VerifiedV1, nil},
		"other type":             {func(h http.Header) { h.Set(EventType, "invoice.deleted") }, VerifiedV1, nil},
		"no-break space":         {func(h http.Header) { h.Set(EventType, "invoice.created\u00a0") }, VerifiedV1, nil},
		"type gone":              {func(h http.Header) { h.Del(EventType) }, VerifiedV1, nil},
		"one more outbox header": {func(h http.Header) { h.Set(Replay, "true") }, VerifiedV1, nil},
		"an unknown one":         {func(h http.Header) { h.Set(OutboxPrefix+"Future", "1") }, VerifiedV1, nil},
		"other tenant":           {func(h http.Header) { h.Set("X-Event-Tenant", "b") }, VerifiedV1, nil},
		"tenant twice":           {func(h http.Header) { h.Add("X-Event-Tenant", "a") }, VerifiedV1, nil},
		"tenant gone":            {func(h http.Header) { h.Del("X-Event-Tenant") }, VerifiedV1, nil},
		"one more of an event":   {func(h http.Header) { h.Set("X-Event-Role", "admin") }, VerifiedV1, nil},
		"other ce-type":          {func(h http.Header) { h.Set("ce-type", "invoice.deleted") }, VerifiedV1, nil},
		"one more attribute":     {func(h http.Header) { h.Set("ce-id", "k2") }, VerifiedV1, nil},
		"other destination":      {func(h http.Header) { h.Set(Destination, "mall") }, VerifiedV1, nil},
		"x1 stripped":            {onlyV1, VerifiedV1, nil},
		"x1 alone, other type":   {func(h http.Header) { onlyX1(h); h.Set(EventType, "invoice.deleted") }, 0, ErrSignature},
		"v1 posing as x1":        {func(h http.Header) { onlyV1(h); h.Set(Signature, "x"+h.Get(Signature)[1:]) }, 0, ErrSignature},
		"x1 posing as v1":        {func(h http.Header) { onlyX1(h); h.Set(Signature, "v"+h.Get(Signature)[1:]) }, 0, ErrSignature},
		"other id":               {func(h http.Header) { h.Set(ID, DeriveID("k2")) }, 0, ErrSignature},
		"id with a dot":          {func(h http.Header) { h.Set(ID, h.Get(ID)+".1") }, 0, ErrID},
		"id twice":               {func(h http.Header) { h.Add(ID, h.Get(ID)) }, 0, ErrUnsigned},
		"signature empty":        {func(h http.Header) { h.Set(Signature, "") }, 0, ErrUnsigned},
		"signature of blanks":    {func(h http.Header) { h.Set(Signature, "  \t ") }, 0, ErrSignature},
		"not base64":             {func(h http.Header) { h.Set(Signature, "v1,%%% x1") }, 0, ErrSignature},
		"URL base64":             {func(h http.Header) { h.Set(Signature, "v1,"+strings.Repeat("_-", 22)) }, 0, ErrSignature},
		"prefix of a signature":  {func(h http.Header) { onlyV1(h); h.Set(Signature, h.Get(Signature)[:len("v1,")+4]) }, 0, ErrSignature},
		"a bit of the padding":   {func(h http.Header) { onlyX1(h); h.Set(Signature, padded(h.Get(Signature))) }, 0, ErrSignature},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := relayHeader("k")
			Sign(h, body, now, secret)
			c.change(h)
			if got, err := Verify(h, body, now, time.Minute, secret); got != c.want || err != c.err {
				t.Errorf("got %v, %v; want %v, %v", got, err, c.want, c.err)
			}
		})
	}
}

// padded changes bits of a signature's last character that stand for nothing.
func padded(signature string) string {
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	last := len(signature) - 2 // before "="
	return signature[:last] + string(digits[strings.IndexByte(digits, signature[last])+1]) + "="
}

// A sender that has the secret but derives the id of another key contradicts itself.
func TestIDBelongsToTheKey(t *testing.T) {
	t.Parallel()
	secret, now := mustParse(t, oldText), time.Now()
	h := relayHeader("k")
	timestamp := strconv.FormatInt(now.Unix(), 10)
	signature := signX1(secret, DeriveID("other"), timestamp, canonicalHeaders(h), nil)
	h[ID], h[Timestamp], h[Signature] = []string{DeriveID("other")}, []string{timestamp}, []string{"x1," + encode(signature)}
	if got, err := Verify(h, nil, now, time.Minute, secret); err != ErrKeyUnbound {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestTolerance(t *testing.T) {
	t.Parallel()
	secret, now := mustParse(t, oldText), time.Unix(1_700_000_000, 999_999_999)
	cases := []struct {
		timestamp string
		want      error
	}{
		{"1700000000", nil},
		{"1699999940", nil}, // 60 s back: the edge belongs to the present
		{"1699999939", ErrTooOld},
		{"1700000060", nil},
		{"1700000061", ErrTooNew},
		{"0", ErrTooOld},
		{"-1", ErrTooOld},
		{strconv.FormatInt(math.MinInt64, 10), ErrTooOld},
		{strconv.FormatInt(math.MaxInt64, 10), ErrTooNew},
		{"9223372036854775808", ErrTimestamp},
		{"1700000000.5", ErrTimestamp},
		{"1.7e9", ErrTimestamp},
		{" 1700000000", ErrTimestamp},
		{"0x6553f100", ErrTimestamp},
		{"", ErrUnsigned},
	}
	for _, c := range cases {
		t.Run(c.timestamp, func(t *testing.T) {
			t.Parallel()
			h := relayHeader("k")
			h.Set(ID, DeriveID("k"))
			h.Set(Timestamp, c.timestamp)
			h.Set(Signature, "x1,"+encode(signX1(secret, DeriveID("k"), c.timestamp, canonicalHeaders(h), nil)))
			if _, err := Verify(h, nil, now, time.Minute, secret); err != c.want {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
}

// FuzzVerify holds Verify to its promise: x1 means that what Sign signed is what arrived.
func FuzzVerify(f *testing.F) {
	secret, now := mustParse(f, oldText), time.Unix(1_700_000_000, 0)
	body := []byte(`{"n":1}`)
	signed := relayHeader("k")
	Sign(signed, body, now, secret)
	add := func(h http.Header, body []byte) {
		f.Add(h.Get(ID), h.Get(Timestamp), h.Get(Signature), h.Get(IdempotencyKey), h.Get(EventType), "", "", body)
	}
	f.Add(signed.Get(ID), signed.Get(Timestamp), signed.Get(Signature), "k", "invoice.created", "Replay", "true", body)
	add(signed, body)
	for _, seed := range [][2]string{
		{IdempotencyKey, "k2"},
		{EventType, "invoice.created "},
		{Timestamp, "-9223372036854775808"},
		{Timestamp, "+1700000000"},
		{ID, "evt.1"},
		{Signature, "v1,,x1, ,"},
		{Signature, strings.Repeat("x1,AAAA ", 100)},
		{Signature, "x1"},
	} {
		h := signed.Clone()
		h.Set(seed[0], seed[1])
		add(h, body)
	}
	f.Fuzz(func(t *testing.T, id, timestamp, signature, key, eventType, extraName, extra string, got []byte) {
		h := http.Header{ID: {id}, Timestamp: {timestamp}, Signature: {signature}, IdempotencyKey: {key}, EventType: {eventType}}
		for _, name := range []string{Attempt, Destination, "X-Event-Tenant", "Ce-Type"} {
			h[name] = signed[name]
		}
		if extraName != "" {
			h.Add(OutboxPrefix+extraName, extra)
		}
		for name, values := range h {
			if strings.ContainsAny(name+strings.Join(values, ""), "\r\n\x00") {
				return // net/http refuses such a header
			}
		}
		verified, err := Verify(h, got, now, time.Minute, secret)
		if (err == nil) != (verified != 0) {
			t.Fatalf("verified %v and error %v", verified, err)
		}
		if err != nil {
			return
		}
		if id != signed.Get(ID) || timestamp != signed.Get(Timestamp) || string(got) != string(body) {
			t.Errorf("forged: %v with id %q, timestamp %q, body %q", verified, id, timestamp, got)
		}
		if verified == VerifiedX1 && (key != "k" || strings.Trim(eventType, " \t") != "invoice.created" || extraName != "") {
			t.Errorf("forged: x1 with key %q, type %q, %q: %q", key, eventType, extraName, extra)
		}
	})
}
