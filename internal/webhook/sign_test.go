package webhook

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const (
	oldText = "whsec_b2xkLXNlY3JldC1mb3ItdGhlLXRlc3Rz"
	newText = "whsec_bmV3LXNlY3JldC1mb3ItdGhlLXRlc3Rz"
)

func mustParse(t testing.TB, text string) Secret {
	t.Helper()
	s, err := ParseSecret(text)
	testkit.Must(t, err)
	return s
}

func relayHeader(key string) http.Header {
	h := http.Header{}
	h.Set(IdempotencyKey, key)
	h.Set(EventType, "invoice.created")
	h.Set(Attempt, "1")
	h.Set(Destination, "shop")
	h.Set("X-Event-Tenant", "a")
	h.Set("Ce-Type", "invoice.created")
	return h
}

// The text that x1 signs is a contract with receivers in other languages, so the vector is fixed.
// It was computed apart from this package:
//
//	printf 'x1\nevt_9b99d34a67e37146003903c935c720b2\n1700000000\nce-type:invoice.created\nx-event-tenant:a\nx-idempotency-key:inv.1/created\nx-outbox-attempt:1\nx-outbox-destination:shop\nx-outbox-event-type:invoice.created\n\n{"n":1}' |
//		openssl dgst -sha256 -mac HMAC -macopt key:old-secret-for-the-tests -binary | base64
func TestSignatureVector(t *testing.T) {
	t.Parallel()
	h := relayHeader("inv.1/created")
	Sign(h, []byte(`{"n":1}`), time.Unix(1700000000, 0), mustParse(t, oldText))
	want := map[string]string{
		ID:        "evt_9b99d34a67e37146003903c935c720b2",
		Timestamp: "1700000000",
		Signature: "v1,0E00yCEEQdPNVgtaTQpE4j2DHw3EZM8BUNY8smUlmBg= x1,yA+kLhLN9ozCLe/ciZuvekSsCJRo6KcNB1ajDCTQB4M=",
	}
	for name, value := range want {
		if got := h.Get(name); got != value {
			t.Errorf("%s\n got %s\nwant %s", name, got, value)
		}
	}
}

func TestRotation(t *testing.T) {
	t.Parallel()
	before, after, body, now := mustParse(t, oldText), mustParse(t, newText), []byte("{}"), time.Now()
	cases := map[string]struct {
		signs, verifies []Secret
		want            error
	}{
		"before":            {[]Secret{before}, []Secret{before}, nil},
		"receiver first":    {[]Secret{before}, []Secret{after, before}, nil},
		"sender with both":  {[]Secret{after, before}, []Secret{before}, nil},
		"sender only new":   {[]Secret{after}, []Secret{after, before}, nil},
		"too early":         {[]Secret{after}, []Secret{before}, ErrSignature},
		"too late":          {[]Secret{before}, []Secret{after}, ErrSignature},
		"no secret to sign": {nil, []Secret{before}, ErrUnsigned},
		"no secret to know": {[]Secret{before}, nil, ErrSignature},
		"zero is no secret": {[]Secret{before}, []Secret{{}}, ErrSignature},
		"zero signs naught": {[]Secret{{}}, []Secret{{}}, ErrUnsigned},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := relayHeader("k")
			Sign(h, body, now, c.signs...)
			got, err := Verify(h, body, now, time.Minute, c.verifies...)
			if err != c.want || err == nil && got != VerifiedX1 {
				t.Errorf("got %v, %v; want %v", got, err, c.want)
			}
		})
	}
}

func TestSigningAgainReplacesTheSignature(t *testing.T) {
	t.Parallel()
	h := relayHeader("k")
	Sign(h, []byte("{}"), time.Now(), mustParse(t, oldText))
	Sign(h, []byte("{}"), time.Now())
	if h.Get(Signature) != "" || len(h[ID]) != 1 || len(h[Timestamp]) != 1 {
		t.Errorf("got %v", h)
	}
}

func TestDerivedID(t *testing.T) {
	t.Parallel()
	ids := map[string]bool{}
	for _, key := range []string{"", "k", "K", "a.b.c", strings.Repeat("k", 255), " k"} {
		id := DeriveID(key)
		if !IsDerivedID(id) || strings.Contains(id, ".") || ids[id] || id != DeriveID(key) {
			t.Errorf("id %q of key %q", id, key)
		}
		ids[id] = true
	}
	for _, id := range []string{"", "evt_", "msg_1", DeriveID("k") + "0", "x" + DeriveID("k"), strings.ToUpper(DeriveID("k")), DeriveID("k") + "\n"} {
		if IsDerivedID(id) {
			t.Errorf("%q counts as derived", id)
		}
	}
}

// Header lines are sorted by name, and repeated values keep their order: what a receiver reads
// first is what was signed first.
func TestCanonicalHeaders(t *testing.T) {
	t.Parallel()
	h := http.Header{
		"X-Outbox-B": {"2", "1"}, "X-Outbox-A-B": {" a\t"}, "X-Outbox-A": {"n\u00a0"}, "X-Outbox-_": {""},
		"X-Event-B": {""}, "X-Event-A": {" a b "}, "Ce-Id": {"k"}, "X-Event": {"no"}, "X-Eventual": {"no"}, "Cell": {"no"}, "Content-Language": {"no"},
		IdempotencyKey: {"k"}, "X-Outboxed": {"no"}, "Content-Type": {"no"}, TraceParent: {"no"}, ID: {"no"},
	}
	want := []string{"ce-id:k", "x-event-a:a b", "x-event-b:", "x-idempotency-key:k", "x-outbox-_:", "x-outbox-a:n\u00a0", "x-outbox-a-b:a", "x-outbox-b:2", "x-outbox-b:1", ""}
	if got := strings.Split(canonicalHeaders(h), "\n"); !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

// A Signer makes the headers that Sign makes.
func TestSignerSignsAsSign(t *testing.T) {
	t.Parallel()
	for _, secrets := range [][]Secret{nil, {{}}, {mustParse(t, newText)}, {mustParse(t, newText), {}, mustParse(t, oldText)}} {
		signer := NewSigner(secrets...)
		for _, body := range []string{"", `{"n":1}`, strings.Repeat("x", 5000)} {
			for range 2 { // with a kept state, too
				h := relayHeader("inv.1/created")
				var covered []byte
				for _, name := range []string{"Ce-Type", "X-Event-Tenant", IdempotencyKey, Attempt, Destination, EventType} {
					covered = AppendCovered(covered, name, h.Get(name))
				}
				now := time.Unix(1700000000, 0)
				Sign(h, []byte(body), now, secrets...)
				got := signer.Sign("inv.1/created", covered, []byte(body), now)
				if want := (Signed{h.Get(ID), h.Get(Timestamp), h.Get(Signature)}); got != want {
					t.Errorf("%d secrets, %d bytes: got %+v, want %+v", len(secrets), len(body), got, want)
				}
			}
		}
	}
}
