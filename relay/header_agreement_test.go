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
	"pgregory.net/rapid"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/outbox"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// Plain SQL, Enqueue and the relay decide alike which headers an event may bring.
func TestSecurityReservedNamesAreReservedEverywhere(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	reserved := []string{
		"Accept-Encoding", "Authorization", "Cf-Connecting-Ip", "Connection", "Content-Encoding", "Content-Length", "Content-Type", "Cookie",
		"Expect", "Fastly-Client-Ip", "Forwarded", "Forwarded-For", "Host", "Http2-Settings", "Keep-Alive", "Proxy", "Remote-User", "Te",
		"Trailer", "Transfer-Encoding", "True-Client-Ip", "Upgrade", "User-Agent", "Via",
		"X-Client-Ip", "X-Cluster-Client-Ip", "X-Envoy-Original-Path", "X-Forwarded", "X-Http-Method", "X-Http-Method-Override",
		"X-Idempotency-Key", "X-Method-Override", "X-Original", "X-Originating-Ip", "X-Real-Ip", "X-Remote-User", "X-Rewrite-Url",
		"Proxy-Authorization", "Proxy-Connection", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Future",
		"X-Original-Url", "X-Original-Method", webhook.EventType, webhook.Replay, webhook.OutboxPrefix, webhook.OutboxPrefix + "Future",
		webhook.ID, webhook.Timestamp, webhook.Signature, "Webhook-Future",
	}
	free := []string{
		"Accept", "Accept-Language", "Baggage", "Ce-Id", "Content-Language", "Cookies", "Idempotency-Key", "Prefer", "Proxys", "Traceparent",
		"Tracestate", "Webhook", "X-Authorization", "X-Content-Type", "X-Forwardeds", "X-Host", "X-Outbox", "X-Real-Ip2",
		"X-Tenant", "X-User-Agent", "Xcookie", "XXOutbox-Id", "Hosts", "Content-Types", "Te2", "X--Real-Ip", "X-Http-Methods", "Vial",
	}
	db := newDatabase(t)
	for i, name := range slices.Concat(reserved, free) {
		for _, spelling := range []string{
			name, strings.ToLower(name), strings.ToUpper(name), strings.ReplaceAll(name, "-", "_"), strings.Replace(name, "-", "_", 1),
			strings.ReplaceAll(name, "-", "."), strings.Replace(name, "-", "~", 1), strings.ToUpper(strings.ReplaceAll(name, "-", "|")),
		} {
			want := i < len(reserved)
			bySQL, byEnqueue, byRelay := db.refusesHeader(spelling)
			if bySQL != want || byEnqueue != want || byRelay != want {
				t.Errorf("%s: plain SQL refuses it: %t, Enqueue: %t, the relay leaves it out: %t; want %t", spelling, bySQL, byEnqueue, byRelay, want)
			}
		}
	}
	for _, name := range []string{"Content-Encoding", "content_encoding", "X-Outbox-Event-Type", "Webhook-Id", "webhook.id", "Host"} {
		problems := Config{Destinations: []post.Destination{{Name: "default", URL: "http://receiver.test/", Headers: map[string]string{name: "x"}}}}.Validate()
		if len(problems) != 1 || !strings.Contains(problems[0].Error(), "is set by the relay or by HTTP itself") {
			t.Errorf("%s of a destination: %v", name, problems)
		}
	}
	for _, name := range []string{"Authorization", "Cookie", "X-Forwarded-Proto", "User-Agent"} { // are its owner's to set
		if problems := (Config{Destinations: []post.Destination{{Name: "default", URL: "http://receiver.test/", Headers: map[string]string{name: "x"}}}}).Validate(); len(problems) != 0 {
			t.Errorf("%s of a destination: %v", name, problems)
		}
	}
}

// Names that are not HTTP tokens get past no list of names: nothing takes them.
func TestSecurityOddNamesOfHeadersAreRefused(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for _, name := range []string{
		"", "Cookie ", " Cookie", "Cookie:", "Cookie\t", "Cookie\r\nHost", "Coo\u212aie", "Authori\u017fation", "\uff23ookie", "Cookie\u200b", "Cookie\u00a0",
		"\u202eCookie", "X\u2010Real\u2010Ip", "X Real Ip", "X\u00adReal-Ip", ":authority", "Cookie\x7f", "Cookie\"", "Cookie\\", "(Cookie)", "Cookie;", "\u0421ookie",
	} {
		bySQL, byEnqueue, _ := db.refusesHeader(name)
		if !bySQL || !byEnqueue {
			t.Errorf("%q: plain SQL refuses it: %t, Enqueue: %t", name, bySQL, byEnqueue)
		}
		d := order()
		d.event.Headers, _ = json.Marshal(map[string]string{name: "from the event"})
		req, err := requestOf(t, post.Destination{URL: "http://receiver.test/"}, d)
		if err != nil {
			continue // the event fails as invalid
		}
		for sent, values := range req.Header {
			if slices.Contains(values, "from the event") {
				t.Errorf("%q: the relay sends it as %q", name, sent)
			}
		}
	}
}

// The pattern of the database and the list of Go agree on any name, also one that was not thought of.
func TestSecurityHeaderListsAgree(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	conn, err := db.pool.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	words := strings.Split("accept authorization cf client cluster connecting connection content cookie encoding envoy expect fastly for "+
		"forwarded host http http2 idempotency ip keep alive key length method original originating outbox override proxy real remote rewrite "+
		"settings te trailer transfer true type upgrade url user agent via webhook x", " ")
	rapid.Check(t, func(r *rapid.T) {
		var names []string
		for range 100 {
			name := ""
			for i := range rapid.IntRange(1, 4).Draw(r, "words") {
				if i > 0 {
					name += rapid.SampledFrom([]string{"-", "-", "-", "-", "_", ".", "~", "!", "'", "", "--", "0", "`", "^"}).Draw(r, "joint")
				}
				name += rapid.SampledFrom(words).Draw(r, "word")
			}
			switch rapid.IntRange(0, 5).Draw(r, "edit") {
			case 0:
				name = strings.ToUpper(name)
			case 1:
				name += rapid.SampledFrom([]string{"-", "_", "s", "-x", "."}).Draw(r, "end")
			case 2:
				name = rapid.SampledFrom([]string{"-", "_", "s", "x-", "."}).Draw(r, "begin") + name
			}
			names = append(names, name)
		}
		var refused []bool
		must(t, conn.QueryRow(t.Context(), `SELECT array_agg(NOT outbox_headers_are_fit(jsonb_build_object('A', '", "cookie": "', n, '": ')) ORDER BY i)
			FROM unnest($1::text[]) WITH ORDINALITY AS t (n, i)`, names).Scan(&refused))
		for i, name := range names {
			if webhook.ReservedForEvents(name) != refused[i] {
				r.Fatalf("%s: Go reserves it: %t, plain SQL refuses it: %t", name, !refused[i], refused[i])
			}
		}
	})
}

// Events of from before the table refused them, or inserted while its constraint was dropped: the receiver sees nothing of
// what they say for the relay, whether the destination has credentials of its own or none.
func TestSecurityRelayDropsReservedHeadersOfStoredEvents(t *testing.T) {
	t.Parallel()
	headers := map[string]string{
		"authorization": "Bearer evil", "Cookie": "evil", "COOKIE_": "fine", "X-Forwarded-For": "evil", "x_forwarded_proto": "evil", "X-Real-Ip": "evil",
		"X.Original.Url": "evil", "X-Http-Method-Override": "evil", "Content-Encoding": "evil", "Proxy": "evil",
		"x_api_key": "evil", "X.Api.Key": "evil", "X-Tenant": "fine",
	}
	object, err := json.Marshal(headers)
	must(t, err)
	for name, own := range map[string]map[string]string{
		"no credentials": {"X-Api-Key": "own"},
		"credentials":    {"X-Api-Key": "own", "Authorization": "Bearer own", "Cookie": "own"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, nil)
			destination := to(rc.URL)
			destination.Headers = own
			start(t, db.config(destination))
			db.unruled()
			db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, headers) VALUES ('t', '{}', 'k', $1)`, string(object))
			becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
			got := rc.all()[0].header
			for header, values := range got {
				if strings.Contains(strings.Join(values, ","), "evil") {
					t.Errorf("the receiver got %s: %q", header, values)
				}
			}
			for header, value := range own {
				if values := got.Values(header); !slices.Equal(values, []string{value}) {
					t.Errorf("%s: %q, want %q", header, values, value)
				}
			}
			if got.Get("X-Tenant") != "fine" || got.Get("Authorization") != own["Authorization"] {
				t.Errorf("the receiver got %v", got)
			}
		})
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
		byEnqueue = invalid.Field == "Headers"
	} else {
		must(db, err)
	}
	d := order()
	d.event.Headers = object
	req, err := requestOf(db, post.Destination{URL: "http://receiver.test/"}, d)
	if err != nil {
		return bySQL, byEnqueue, true
	}
	byRelay = !slices.Contains(req.Header[http.CanonicalHeaderKey(name)], "from the event")
	return bySQL, byEnqueue, byRelay
}
