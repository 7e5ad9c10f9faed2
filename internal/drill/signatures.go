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
func forged(events func(*trial) []event) func(*trial) {
	return func(t *trial) {
		for _, e := range events(t) {
			t.which = e.which
			a := t.send(e)
			t.effects(0, 0, e.key)
			if !a.refused() {
				t.fault("it %s", a)
			}
		}
	}
}

func unsigned(t *trial) []event {
	return []event{
		t.event().tampered("without webhook-signature", drop(webhook.Signature)),
		t.event().tampered("without webhook-id, webhook-timestamp and webhook-signature", drop(webhook.ID, webhook.Timestamp, webhook.Signature)),
	}
}

func wrongSecret(t *trial) []event { return []event{t.event().signedBy("", stranger())} }

func retiredSecret(t *trial) []event {
	if len(t.Retired) == 0 {
		t.skip("no secret is named that must be refused (--retired-secret-file)")
	}
	return t.eachOf(t.Retired)
}

func eachSecret(t *trial) []event {
	if len(t.Secrets) < 2 {
		t.skip("only one secret is given; give all that the receiver accepts, with commas")
	}
	return t.eachOf(t.Secrets)
}

// eachOf returns an event for each secret, signed with it alone.
func (t *trial) eachOf(secrets []webhook.Secret) (events []event) {
	for i, secret := range secrets {
		events = append(events, t.event().signedBy(fmt.Sprintf("signed with secret %d alone", i+1), secret))
	}
	return events
}

func cutSignature(t *trial) (events []event) {
	for which, cut := range map[string]func(string) string{
		"that is empty":  func(string) string { return "x1, v1," },
		"that is cut":    func(s string) string { return s[:len("v1,abcd")] + " " + s[strings.Index(s, "x1,"):][:len("x1,abcd")] },
		"no base64":      func(string) string { return "v1,***** x1,*****" },
		"of no version":  strings.NewReplacer("v1,", "", "x1,", "").Replace,
		"that continues": func(s string) string { return strings.ReplaceAll(s, "=", "A=") },
	} {
		change := func(h http.Header) { set(webhook.Signature, cut(h.Get(webhook.Signature)))(h) }
		events = append(events, t.event().tampered("with a signature "+which, change))
	}
	return events
}

func changedBody(t *trial) []event {
	e := t.event()
	e.sent = append([]byte(" "), e.body...)
	return []event{e}
}

func changedKey(t *trial) {
	for _, keys := range [...]func(right, other string) []string{
		func(_, other string) []string { return []string{other} },
		func(right, other string) []string { return []string{other, right} },
	} {
		e, other := t.event(), t.event().key
		t.accepts(e)
		a := t.send(e.tampered("", func(h http.Header) { h[webhook.IdempotencyKey] = keys(e.key, other) }))
		// A receiver that knows events by webhook-id, which every signature covers, sees a
		// duplicate.
		t.effects(1, 1, e.key, other)
		if !a.refused() && (t.Probe == nil || !a.accepted()) {
			t.fault("it %s", a)
		}
	}
}

func changedHeader(t *trial) {
	for _, tamper := range [...]func(http.Header){set(webhook.Attempt, "99"), set(webhook.OutboxPrefix+"Other", "1"), drop(webhook.NotAfter), set("X-Event-Drill", "1")} {
		if a := t.send(t.event().tampered("", tamper)); !a.refused() {
			t.advise("it %s: a proxy, or an attacker, may change the event's type and the other headers about it", a)
		}
	}
}

// signedAt returns an event for each distance from now at which it is signed.
func (t *trial) signedAt(distances ...time.Duration) (events []event) {
	for _, by := range distances {
		when := map[bool]string{true: " ahead", false: " ago"}[by > 0]
		events = append(events, t.event().at(time.Now().Add(by), "signed "+by.Abs().String()+when))
	}
	return events
}

func oldTimestamp(t *trial) []event    { return t.signedAt(-2 * t.Tolerance) }
func futureTimestamp(t *trial) []event { return t.signedAt(2 * t.Tolerance) }
func withinTolerance(t *trial) []event { return t.signedAt(-t.Tolerance/2, t.Tolerance/2) }

func oddTimestamp(t *trial) (events []event) {
	// The last one but one is so far away that its distance, negated, is negative again.
	for _, seconds := range [...]int64{-1, 0, time.Now().UnixMilli(), math.MaxInt64, math.MinInt64 + time.Now().Unix(), math.MinInt64} {
		events = append(events, t.event().at(time.Unix(seconds, 0), fmt.Sprintf("with the timestamp %d", seconds)))
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
	return []event{t.event().covering(set(webhook.OutboxPrefix+"Drill", "new")), t.event().covering(set("X-Event-Drill", "new"))}
}

func refusalStatus(t *trial) {
	if a := t.send(t.event().signedBy("", stranger())); a.final() {
		t.advise("it %s: while a secret is being changed, a relay fails each event at once instead of trying again", a)
	}
}
