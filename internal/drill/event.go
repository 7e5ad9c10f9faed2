package drill

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// An event is what one or several requests are about. Its methods return changed copies.
type event struct {
	id       int64
	key, typ string
	version  int
	body     []byte
	created  time.Time
	attempt  int

	signedAt time.Time         // zero: now
	secrets  []webhook.Secret  // nil: those of the drill
	covered  func(http.Header) // changes headers before they are signed
	tamper   func(http.Header) // and afterwards
	sent     []byte            // instead of the body that is signed; nil: that one
	which    string            // of several events of a check, for people
}

// event returns a new event of the check. Its key tells a reader of the receiver's tables which one
// that is.
func (t *trial) event() event {
	return t.eventOf(fmt.Sprintf("%s-%s-%d", t.prefix, t.check, t.ids.Add(1)%1_000_000))
}

// eventOf returns a new event with a key.
func (d *drill) eventOf(key string) event {
	quoted, _ := json.Marshal(key)
	body := strings.ReplaceAll(d.Payload, "{key}", string(quoted[1:len(quoted)-1]))
	return event{id: d.ids.Add(1), key: key, typ: d.Type, version: d.Version, body: []byte(body), created: time.Now()}
}

func (e event) with(body []byte) event { e.body = body; return e }

func (e event) at(signed time.Time, which string) event {
	e.signedAt, e.which = signed, which
	return e
}

func (e event) signedBy(which string, secrets ...webhook.Secret) event {
	e.secrets, e.which = secrets, which
	return e
}

func (e event) covering(set func(http.Header)) event { e.covered = set; return e }

func (e event) tampered(which string, set func(http.Header)) event {
	e.tamper, e.which = set, which
	return e
}

// padded returns the event with blanks behind its payload, which JSON allows, up to a number of
// bytes.
func (e event) padded(size int) event {
	return e.with(append(bytes.Clone(e.body), bytes.Repeat([]byte(" "), max(size-len(e.body), 0))...))
}

// again returns the event for another attempt.
func (e event) again() event { e.attempt++; return e }

func set(name, value string) func(http.Header) {
	return func(h http.Header) { h[name] = []string{value} }
}

func drop(names ...string) func(http.Header) {
	return func(h http.Header) {
		for _, name := range names {
			delete(h, name)
		}
	}
}

// Of what a relay sends.
const (
	notAfter   = 30 * 24 * time.Hour
	timeFormat = "2006-01-02T15:04:05.000000Z"
)

// request returns headers and body of one more request of an event: as a relay sends it, but for
// what the event changes.
func (d *drill) request(e event) (http.Header, []byte) {
	h := http.Header{"Content-Type": {"application/json"}}
	for name, values := range d.Header {
		h[name] = values
	}
	for name, value := range map[string]string{
		webhook.IdempotencyKey: e.key,
		webhook.EventType:      e.typ,
		webhook.EventVersion:   strconv.Itoa(e.version),
		webhook.EventID:        strconv.FormatInt(e.id, 10),
		webhook.CreatedAt:      e.created.UTC().Format(timeFormat),
		webhook.NotAfter:       e.created.Add(notAfter).UTC().Format(timeFormat),
		webhook.Attempt:        strconv.Itoa(e.attempt + 1),
		webhook.DeliveryID:     fmt.Sprintf("%d-%s-%d", e.id, d.Destination, d.ids.Add(1)),
		webhook.Destination:    d.Destination,
	} {
		h[name] = []string{value}
	}
	if e.covered != nil {
		e.covered(h)
	}
	if e.secrets == nil {
		e.secrets = d.Secrets
	}
	if e.signedAt.IsZero() {
		e.signedAt = time.Now()
	}
	webhook.Sign(h, e.body, e.signedAt, e.secrets...)
	if e.tamper != nil {
		e.tamper(h)
	}
	if e.sent != nil {
		return h, e.sent
	}
	return h, e.body
}

// stranger returns a secret that the receiver does not have.
func stranger() webhook.Secret {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it never fails
	secret, err := webhook.ParseSecret("whsec_" + base64.StdEncoding.EncodeToString(key))
	if err != nil {
		panic(err) // 32 bytes are a secret
	}
	return secret
}
