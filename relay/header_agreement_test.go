package relay

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/outbox"
)

// Plain SQL, Enqueue and the relay decide alike which headers an event may bring.
func TestReservedNamesAreReservedEverywhere(t *testing.T) {
	t.Parallel()
	reserved := []string{
		"Authorization", "Connection", "Content-Encoding", "Content-Length", "Content-Type", "Cookie", "Expect", "Forwarded", "Host",
		"Keep-Alive", "Te", "Trailer", "Transfer-Encoding", "True-Client-Ip", "Upgrade", "User-Agent",
		"X-Client-Ip", "X-Http-Method", "X-Http-Method-Override", "X-Idempotency-Key", "X-Method-Override", "X-Real-Ip", "X-Rewrite-Url",
		"Proxy-Authorization", "Proxy-Connection", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Original-Url",
		"X-Original-Method", webhook.EventType, webhook.Replay, webhook.OutboxPrefix, webhook.OutboxPrefix + "Future",
		webhook.ID, webhook.Timestamp, webhook.Signature, "Webhook-Future",
	}
	free := []string{
		"Accept", "Accept-Language", "Baggage", "Ce-Id", "Content-Language", "Cookies", "Idempotency-Key", "Prefer", "Proxy", "Traceparent",
		"Tracestate", "Webhook", "X-Authorization", "X-Content-Type", "X-Forwarded", "X-Host", "X-Original", "X-Outbox", "X-Real-Ip2",
		"X-Tenant", "X-User-Agent", "Xcookie", "XXOutbox-Id", "Hosts", "Content-Types", "Te2", "X.Real-Ip", "X-Http-Methods",
	}
	db := newDatabase(t)
	for i, name := range slices.Concat(reserved, free) {
		for _, spelling := range []string{name, strings.ToLower(name), strings.ToUpper(name), strings.ReplaceAll(name, "-", "_"), strings.Replace(name, "-", "_", 1)} {
			want := i < len(reserved)
			bySQL, byEnqueue, byRelay := db.refusesHeader(spelling)
			if bySQL != want || byEnqueue != want || byRelay != want {
				t.Errorf("%s: plain SQL refuses it: %t, Enqueue: %t, the relay leaves it out: %t; want %t", spelling, bySQL, byEnqueue, byRelay, want)
			}
		}
	}
	for _, name := range []string{"Content-Encoding", "content_encoding", "X-Outbox-Event-Type", "Webhook-Id", "Host"} {
		problems := Config{Destinations: []Destination{{Name: "default", URL: "http://receiver.test/", Headers: map[string]string{name: "x"}}}}.Validate()
		if len(problems) != 1 || !strings.Contains(problems[0].Error(), "is set by the relay or by HTTP itself") {
			t.Errorf("%s of a destination: %v", name, problems)
		}
	}
	for _, name := range []string{"Authorization", "Cookie", "X-Forwarded-Proto", "User-Agent"} { // are its owner's to set
		if problems := (Config{Destinations: []Destination{{Name: "default", URL: "http://receiver.test/", Headers: map[string]string{name: "x"}}}}).Validate(); len(problems) != 0 {
			t.Errorf("%s of a destination: %v", name, problems)
		}
	}
}

// refusesHeader reports whether an event may not bring a header, by each of the three that it meets.
func (db *database) refusesHeader(name string) (bySQL, byEnqueue, byRelay bool) {
	db.Helper()
	headers := map[string]string{name: "from the event"}
	object, err := json.Marshal(headers)
	must(db, err)
	insert := func(do func(pgx.Tx) error) error {
		tx, err := db.pool.Begin(db.Context())
		must(db, err)
		defer func() { must(db, tx.Rollback(db.Context())) }()
		return do(tx)
	}
	err = insert(func(tx pgx.Tx) error {
		_, err := tx.Exec(db.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key, headers) VALUES ('t', '1', 'k', $1)`, string(object))
		return err
	})
	if violation, ok := errors.AsType[*pgconn.PgError](err); ok {
		bySQL = violation.ConstraintName == "outbox_headers_have_unreserved_names_and_printable_values"
	} else {
		must(db, err)
	}
	err = insert(func(tx pgx.Tx) error {
		_, err := outbox.Enqueue(db.Context(), tx, outbox.Event{Type: "t", IdempotencyKey: "k", Payload: json.RawMessage("1"), Headers: headers})
		return err
	})
	if invalid, ok := errors.AsType[*outbox.ValidationError](err); ok {
		byEnqueue = strings.HasSuffix(invalid.Problem, " is reserved")
	} else {
		must(db, err)
	}
	d := order()
	d.event.headers = object
	req, err := requestOf(db, Destination{URL: "http://receiver.test/"}, d)
	must(db, err)
	byRelay = !slices.Contains(req.Header[http.CanonicalHeaderKey(name)], "from the event")
	return bySQL, byEnqueue, byRelay
}
