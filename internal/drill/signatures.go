package drill

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// forged sends events that must be refused and must not take effect.
func forged(events func(*trial) []event) func(*trial) finding {
	return func(t *trial) finding {
		for _, e := range events(t) {
			a := t.send(e)
			if found := t.effects(0, 0, e.key); found.text != "" {
				return found.about("and it " + a.String()).about(e.which)
			}
			if !a.refused() {
				return fault("it %s", a).about(e.which)
			}
		}
		return finding{}
	}
}

func unsigned(t *trial) []event {
	return []event{
		t.event().tampered("without webhook-signature", drop(webhook.Signature)),
		t.event().tampered("without webhook-id, webhook-timestamp and webhook-signature", drop(webhook.ID, webhook.Timestamp, webhook.Signature)),
	}
}

func wrongSecret(t *trial) []event { return []event{t.event().signedBy("", stranger())} }

func retiredSecret(t *trial) finding {
	if len(t.Retired) == 0 {
		return finding{skipped: "no secret is named that must be refused (--retired-secret-file)"}
	}
	return forged(func(t *trial) []event { return t.eachOf(t.Retired) })(t)
}

// eachOf returns an event for each secret, signed with it alone.
func (t *trial) eachOf(secrets []webhook.Secret) (events []event) {
	for i, secret := range secrets {
		events = append(events, t.event().signedBy(fmt.Sprintf("signed with secret %d alone", i+1), secret))
	}
	return events
}

func eachSecret(t *trial) finding {
	if len(t.Secrets) < 2 {
		return finding{skipped: "only one secret is given; give all that the receiver accepts, with commas"}
	}
	return fine(func(t *trial) []event { return t.eachOf(t.Secrets) })(t)
}

func cutSignature(t *trial) (events []event) {
	for _, c := range [...]struct {
		which string
		cut   func(string) string
	}{
		{"that is empty", func(string) string { return "x1, v1," }},
		{"that is cut after four digits", func(s string) string { return s[:len("v1,abcd")] + " " + s[strings.Index(s, "x1,"):][:len("x1,abcd")] }},
		{"that is no base64", func(string) string { return "v1,***** x1,*****" }},
		{"without its version", strings.NewReplacer("v1,", "", "x1,", "").Replace},
		{"that goes on behind its end", func(s string) string { return strings.ReplaceAll(s, "=", "A=") }},
	} {
		events = append(events, t.event().tampered("with a signature "+c.which, func(h http.Header) {
			set(webhook.Signature, c.cut(h.Get(webhook.Signature)))(h)
		}))
	}
	return events
}

func changedBody(t *trial) []event {
	e := t.event()
	e.sent = append([]byte(" "), e.body...)
	return []event{e}
}

func changedKey(t *trial) finding {
	for _, second := range [...]bool{false, true} {
		e, other := t.event(), t.event().key
		if a := t.send(e); !a.accepted() {
			return fault("it %s to a valid event", a)
		}
		a := t.send(e.tampered("", func(h http.Header) {
			h[webhook.IdempotencyKey] = []string{other, e.key}[:map[bool]int{false: 1, true: 2}[second]]
		}))
		// A receiver that knows events by webhook-id, which every signature covers, sees a duplicate.
		if found := t.effects(1, 1, e.key, other); found.text != "" {
			return found
		}
		if !a.refused() && (t.Probe == nil || !a.accepted()) {
			return fault("it %s", a)
		}
	}
	return finding{}
}

func changedHeader(t *trial) finding {
	for _, tamper := range [...]func(http.Header){set(webhook.Attempt, "99"), set(webhook.OutboxPrefix+"Other", "1"), drop(webhook.NotAfter)} {
		if a := t.send(t.event().tampered("", tamper)); !a.refused() {
			return advice("it %s: whoever carries a request may change the event's type and the other X-Outbox headers", a)
		}
	}
	return finding{}
}

func oldTimestamp(t *trial) []event {
	return []event{t.event().at(time.Now().Add(-2*t.Tolerance), "")}
}

func futureTimestamp(t *trial) []event {
	return []event{t.event().at(time.Now().Add(2*t.Tolerance), "")}
}

func oddTimestamp(t *trial) (events []event) {
	// The last one but one is so far away that its distance, negated, is negative again.
	for _, seconds := range [...]int64{-1, 0, time.Now().UnixMilli(), math.MaxInt64, math.MinInt64 + time.Now().Unix(), math.MinInt64} {
		events = append(events, t.event().at(time.Unix(seconds, 0), fmt.Sprintf("with the timestamp %d", seconds)))
	}
	return events
}

func withinTolerance(t *trial) (events []event) {
	for _, by := range [...]time.Duration{-t.Tolerance / 2, t.Tolerance / 2} {
		events = append(events, t.event().at(time.Now().Add(by), "with a timestamp "+by.String()+" from now"))
	}
	return events
}

func otherSignatures(t *trial) []event {
	unknown := func(h http.Header) { set(webhook.Signature, "v9,AAAA "+h.Get(webhook.Signature)+" v1a,AAAA")(h) }
	return []event{
		t.event().signedBy("", append([]webhook.Secret{stranger()}, t.Secrets...)...).tampered("with the right signature behind those of another secret", unknown),
		t.event().signedBy("", append(slices.Clone(t.Secrets), stranger())...).tampered("with the right signature before those of another secret", unknown),
	}
}

func newHeader(t *trial) []event {
	return []event{t.event().covering(set(webhook.OutboxPrefix+"Drill", "new"))}
}

func refusalStatus(t *trial) finding {
	if a := t.send(t.event().signedBy("", stranger())); a.final() {
		return advice("it %s: while a secret is being changed, a relay fails each event at once instead of trying again", a)
	}
	return finding{}
}
