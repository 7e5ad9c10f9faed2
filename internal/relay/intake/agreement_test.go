package intake_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"

	"pgregory.net/rapid"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/outbox"
)

// The names of the rules. The table has constraints with those of the type, the key and the time;
// an event that breaks another one fails under its name when it is routed.
const (
	typeRule      = "outbox_event_type_is_1_to_255_printable_ascii_no_blanks"
	keyRule       = "outbox_idempotency_key_is_1_to_255_printable_ascii"
	orderingRule  = "outbox_ordering_key_is_1_to_255_printable_ascii"
	referenceRule = "outbox_related_reference_is_1_to_255_printable_ascii"
	versionRule   = "outbox_event_version_is_positive"
	sizeRule      = "outbox_payload_is_at_most_1_mib"
	headersRule   = "outbox_headers_have_unreserved_names_and_printable_values"
	availableRule = "outbox_available_at_is_in_year_1_to_366_days_ahead"

	invalidText  = "22P02" // invalid_text_representation: not JSON
	invalidBytes = "22021" // character_not_in_repertoire
)

// TestGoAndTableAgree gives each event to Enqueue and, without the package, to the table, and then
// to the rules of relays.
func TestGoAndTableAgree(t *testing.T) {
	t.Parallel()
	db := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
	long := strings.Repeat("x", 255)
	set := func(field *string, value string) { *field = value }
	headers := func(e *outbox.Event, pairs ...string) {
		e.Headers = map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			e.Headers[pairs[i]] = pairs[i+1]
		}
	}
	for _, c := range []struct {
		name  string
		edit  func(*outbox.Event)
		field string // that Go refuses, "" if it accepts
		rule  string // by which the table or a relay refuses, "" if both accept
	}{
		{"defaults", func(e *outbox.Event) {}, "", ""},
		{"type of 255", func(e *outbox.Event) { set(&e.Type, long) }, "", ""},
		{"type of 256", func(e *outbox.Event) { set(&e.Type, long+"x") }, "Type", typeRule},
		{"type of 1 MB", func(e *outbox.Event) { set(&e.Type, strings.Repeat("x", 1_000_000)) }, "Type", typeRule},
		{"type empty", func(e *outbox.Event) { set(&e.Type, "") }, "Type", typeRule},
		{"type with blank", func(e *outbox.Event) { set(&e.Type, "a b") }, "Type", typeRule},
		{"type with every sign", func(e *outbox.Event) { set(&e.Type, printable()) }, "", ""},
		{"type with trailing newline", func(e *outbox.Event) { set(&e.Type, "a\n") }, "Type", typeRule},
		{"key of 255", func(e *outbox.Event) { set(&e.IdempotencyKey, long) }, "", ""},
		{"key of 256", func(e *outbox.Event) { set(&e.IdempotencyKey, long+"x") }, "IdempotencyKey", keyRule},
		{"key empty", func(e *outbox.Event) { set(&e.IdempotencyKey, "") }, "IdempotencyKey", keyRule},
		{"key with inner blank", func(e *outbox.Event) { set(&e.IdempotencyKey, "a b") }, "", ""},
		{"key with leading blank", func(e *outbox.Event) { set(&e.IdempotencyKey, " a") }, "IdempotencyKey", keyRule},
		{"key with trailing blank", func(e *outbox.Event) { set(&e.IdempotencyKey, "a ") }, "IdempotencyKey", keyRule},
		{"key a single blank", func(e *outbox.Event) { set(&e.IdempotencyKey, " ") }, "IdempotencyKey", keyRule},
		{"key with CRLF", func(e *outbox.Event) { set(&e.IdempotencyKey, "a\r\nX: y") }, "IdempotencyKey", keyRule},
		{"key with DEL", func(e *outbox.Event) { set(&e.IdempotencyKey, "a\x7f") }, "IdempotencyKey", keyRule},
		{"key with NUL", func(e *outbox.Event) { set(&e.IdempotencyKey, "a\x00b") }, "IdempotencyKey", invalidBytes},
		{"key not UTF-8", func(e *outbox.Event) { set(&e.IdempotencyKey, "a\xff") }, "IdempotencyKey", invalidBytes},
		{"key with ANSI escape", func(e *outbox.Event) { set(&e.IdempotencyKey, "\x1b[31m") }, "IdempotencyKey", keyRule},
		{"key with RTL override", func(e *outbox.Event) { set(&e.IdempotencyKey, "a\u202eb") }, "IdempotencyKey", keyRule},
		{"ordering key of 256", func(e *outbox.Event) { set(&e.OrderingKey, long+"x") }, "OrderingKey", orderingRule},
		{"ordering key with tab", func(e *outbox.Event) { set(&e.OrderingKey, "a\tb") }, "OrderingKey", orderingRule},
		{"reference of 255", func(e *outbox.Event) { set(&e.RelatedReference, long) }, "", ""},
		{"reference not ASCII", func(e *outbox.Event) { set(&e.RelatedReference, "Straße") }, "RelatedReference", referenceRule},
		{"greatest version", func(e *outbox.Event) { e.Version = math.MaxInt32 }, "", ""},
		{"version below zero", func(e *outbox.Event) { e.Version = -1 }, "Version", versionRule},
		{"payload of 1 MiB", func(e *outbox.Event) { e.Payload = json.RawMessage(strings.Repeat(" ", 1<<20-1) + "1") }, "", ""},
		{"payload of 1 MiB and a byte", func(e *outbox.Event) { e.Payload = json.RawMessage(strings.Repeat(" ", 1<<20) + "1") }, "Payload", sizeRule},
		{"payload empty", func(e *outbox.Event) { e.Payload = json.RawMessage{} }, "Payload", invalidText},
		{"payload blank", func(e *outbox.Event) { e.Payload = json.RawMessage(" ") }, "Payload", invalidText},
		{"payload not JSON", func(e *outbox.Event) { e.Payload = json.RawMessage("<a/>") }, "Payload", invalidText},
		{"payload not UTF-8", func(e *outbox.Event) { e.Payload = json.RawMessage("\"\xff\"") }, "Payload", invalidBytes},
		{"payload JSON null", func(e *outbox.Event) { e.Payload = json.RawMessage("null") }, "", ""},
		{"payload nested 10,000 deep", func(e *outbox.Event) {
			e.Payload = json.RawMessage(strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000))
		}, "", ""},
		{"header with every sign", func(e *outbox.Event) { headers(e, "!#$%&'*+-.^_`|~09AZaz", " "+printable()+" ") }, "", ""},
		{"header empty value", func(e *outbox.Event) { headers(e, "ce-a", "") }, "", ""},
		{"header empty name", func(e *outbox.Event) { headers(e, "", "x") }, "Headers", headersRule},
		{"header name with colon", func(e *outbox.Event) { headers(e, "a:", "x") }, "Headers", headersRule},
		{"header name not ASCII", func(e *outbox.Event) { headers(e, "ä", "x") }, "Headers", headersRule},
		{"header name with newline", func(e *outbox.Event) { headers(e, "a\n", "x") }, "Headers", headersRule},
		{"header value with CRLF", func(e *outbox.Event) { headers(e, "a", "x\r\nHost: evil") }, "Headers", headersRule},
		{"header value not ASCII", func(e *outbox.Event) { headers(e, "a", "ü") }, "Headers", headersRule},
		{"header reserved", func(e *outbox.Event) { headers(e, "Host", "a") }, "Headers", headersRule},
		{"header reserved in other spelling", func(e *outbox.Event) { headers(e, "X_Real.IP", "a") }, "Headers", headersRule},
		{"header reserved by prefix", func(e *outbox.Event) { headers(e, "a", "x", "x-outbox-y", "a") }, "Headers", headersRule},
		{"header with a reserved beginning", func(e *outbox.Event) { headers(e, "proxying", "a", "tea", `", "host": "`) }, "", ""},
		{"headers of 8192", func(e *outbox.Event) { headers(e, "a", `"\`+strings.Repeat("x", 8170), "b", "") }, "", ""},
		{"headers of 8193", func(e *outbox.Event) { headers(e, "a", `"\`+strings.Repeat("x", 8171), "b", "") }, "Headers", headersRule},
		{"available in year 1", func(e *outbox.Event) { e.AvailableAt = time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC) }, "", ""},
		{"available in 1 BC", func(e *outbox.Event) { e.AvailableAt = time.Date(0, 12, 31, 23, 59, 59, 0, time.UTC) }, "AvailableAt", availableRule},
		{"available in 364 days", func(e *outbox.Event) { e.AvailableAt = in(364) }, "", ""},
		{"available in 367 days", func(e *outbox.Event) { e.AvailableAt = in(367) }, "AvailableAt", availableRule},
		{"available in 9998", func(e *outbox.Event) { e.AvailableAt = time.Date(9998, 12, 31, 23, 59, 59, 999_999_000, time.UTC) }, "AvailableAt", availableRule},
		{"available in 9999", func(e *outbox.Event) { e.AvailableAt = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC) }, "AvailableAt", availableRule},
		{"available in 9998 of its zone", func(e *outbox.Event) {
			e.AvailableAt = time.Date(9998, 12, 31, 23, 0, 0, 0, time.FixedZone("", -3600))
		}, "AvailableAt", availableRule},
	} {
		t.Run(c.name, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			e := event("some key")
			c.edit(&e)
			testkit.Equal(t, "refused by Go", goRefuses(t, db, e), c.field)
			testkit.Equal(t, "refused by the table or a relay", sqlRefuses(t, db, e), c.rule)
		})
	}
}

// in returns the moment that is that many days away, as exact as the database.
func in(days int) time.Time { return time.Now().UTC().AddDate(0, 0, days).Truncate(time.Microsecond) }

// TestGoAndTableAgreeOnWhatever compares the verdicts on generated events, and, where they accept,
// what is stored.
func TestGoAndTableAgreeOnWhatever(t *testing.T) {
	t.Parallel()
	db := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
	rapid.Check(t, func(r *rapid.T) {
		e := outbox.Event{
			Type:             textGenerator.Draw(r, "type"),
			Version:          rapid.IntRange(-1, math.MaxInt32).Draw(r, "version"),
			Payload:          json.RawMessage(payloadGenerator.Draw(r, "payload")),
			IdempotencyKey:   textGenerator.Draw(r, "key"),
			OrderingKey:      textGenerator.Draw(r, "ordering key"),
			RelatedReference: textGenerator.Draw(r, "reference"),
			Headers:          rapid.MapOfN(textGenerator, textGenerator, 0, 3).Draw(r, "headers"),
		}
		// Most fields are fixed most of the time, or hardly an event would be valid.
		valid := event("some key")
		keep := rapid.SampledFrom([]string{"type", "payload", "key", "texts", "headers", "all"}).Draw(r, "keep")
		if keep != "type" && keep != "all" {
			e.Type, e.Version = valid.Type, max(e.Version, 0)
		}
		if keep != "payload" && keep != "all" {
			e.Payload = valid.Payload
		}
		if keep != "key" && keep != "all" {
			e.IdempotencyKey = valid.IdempotencyKey
		}
		if keep != "texts" && keep != "all" {
			e.OrderingKey, e.RelatedReference = "", ""
		}
		if keep != "headers" && keep != "all" {
			e.Headers = nil
		}
		field, rule := goRefuses(t, db, e), sqlRefuses(t, db, e)
		if (field == "") != (rule == "") {
			r.Fatalf("Go refuses %q, the table or a relay %q: %#v", field, rule, e)
		}
	})
}

// goRefuses returns the field that Enqueue refuses. An accepted event must be stored as given.
func goRefuses(t *testing.T, db *pgxpool.Pool, e outbox.Event) string {
	t.Helper()
	tx, err := db.Begin(t.Context())
	pgtest.Must(t, err)
	defer tx.Rollback(t.Context())
	_, err = outbox.Producer{EventHeaders: []string{"*"}}.Enqueue(t.Context(), tx, e)
	if invalid, ok := errors.AsType[*outbox.ValidationError](err); ok {
		return invalid.Field
	}
	pgtest.Must(t, err)

	var got outbox.Event
	pgtest.Must(t, tx.QueryRow(t.Context(), `SELECT event_type, event_version, payload::text, idempotency_key,
			coalesce(ordering_key, ''), coalesce(related_reference, ''), headers, available_at FROM outbox`).
		Scan(&got.Type, &got.Version, (*[]byte)(&got.Payload), &got.IdempotencyKey, &got.OrderingKey, &got.RelatedReference,
			&got.Headers, &got.AvailableAt))
	want := e
	want.Version = max(e.Version, 1)
	if e.Headers == nil {
		want.Headers = map[string]string{}
	}
	got.AvailableAt = got.AvailableAt.UTC()
	if e.AvailableAt.IsZero() {
		want.AvailableAt = got.AvailableAt
	}
	testkit.Equal(t, "stored", got, want)
	return ""
}

// sqlRefuses returns the constraint or the SQLSTATE with which a plain INSERT is refused. If it is
// not, it returns the rule by which relays refuse what was stored.
func sqlRefuses(t *testing.T, db *pgxpool.Pool, e outbox.Event) string {
	t.Helper()
	tx, err := db.Begin(t.Context())
	pgtest.Must(t, err)
	defer tx.Rollback(t.Context())
	headers, err := json.Marshal(e.Headers)
	pgtest.Must(t, err)
	available := any(e.AvailableAt)
	if e.AvailableAt.IsZero() {
		available = time.Now()
	}
	version := e.Version
	if version == 0 {
		version = 1
	}
	_, err = tx.Exec(t.Context(), `INSERT INTO outbox (event_type, event_version, payload, idempotency_key, ordering_key,
			related_reference, headers, available_at)
		VALUES ($1, $2, $3::text::json, $4, nullif($5, ''), nullif($6, ''), coalesce(nullif($7::text, 'null'), '{}')::jsonb, $8)`,
		e.Type, version, string(e.Payload), e.IdempotencyKey, e.OrderingKey, e.RelatedReference, string(headers), available)
	if err != nil {
		var refused *pgconn.PgError
		if !errors.As(err, &refused) {
			t.Fatalf("not an error of PostgreSQL: %v", err)
		}
		return cmp.Or(refused.ConstraintName, refused.Code)
	}
	return storedRule(t, tx)
}

// storedRule returns the rule by which relays refuse the only event of the outbox.
func storedRule(t *testing.T, tx pgx.Tx) string {
	t.Helper()
	var stored intake.Event
	pgtest.Must(t, tx.QueryRow(t.Context(), `SELECT id, event_type::text, event_version, octet_length(payload::text), idempotency_key::text, ordering_key, related_reference,
			nullif(headers, '{}')::text, available_at, created_at::timestamptz FROM outbox`).
		Scan(&stored.ID, &stored.EventType, &stored.Version, &stored.PayloadBytes, &stored.Key, &stored.OrderingKey, &stored.RelatedReference,
			&stored.Headers, &stored.AvailableAt, &stored.CreatedAt))
	return intake.BrokenRule(&stored)
}

// TestRulesOfRows gives relays rows that no Event makes, or that are older than the domains.
func TestRulesOfRows(t *testing.T) {
	t.Parallel()
	db := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
	// Only the owner can write what a domain refuses.
	_, err := db.Exec(t.Context(), `ALTER DOMAIN outbox_event_type DROP CONSTRAINT `+typeRule+`; ALTER DOMAIN outbox_idempotency_key DROP CONSTRAINT `+keyRule)
	pgtest.Must(t, err)
	check := func(column, value, want string) {
		t.Helper()
		tx, err := db.Begin(t.Context())
		pgtest.Must(t, err)
		defer tx.Rollback(t.Context())
		row := map[string]string{"event_type": "'t'", "payload": "'{}'", "idempotency_key": "'k'"}
		row[column] = value
		names := slices.Collect(maps.Keys(row))
		var values []string
		for _, name := range names {
			values = append(values, row[name])
		}
		_, err = tx.Exec(t.Context(), `INSERT INTO outbox (`+strings.Join(names, ", ")+`) OVERRIDING SYSTEM VALUE VALUES (`+strings.Join(values, ", ")+`)`)
		pgtest.Must(t, err)
		testkit.Equal(t, fmt.Sprintf("%s = %.60s", column, value), storedRule(t, tx), want)
	}
	long := strings.Repeat("x", 255)
	for column, rule := range map[string]string{"event_type": typeRule, "idempotency_key": keyRule, "ordering_key": orderingRule, "related_reference": referenceRule} {
		for _, text := range []string{"a", "~", "!", long} {
			check(column, "'"+text+"'", "")
		}
		for _, text := range []string{"", " a", "a ", " ", "a\t", "é", long + "x", "\x7f"} {
			check(column, "'"+text+"'", rule)
		}
	}
	check("event_type", "'a b'", typeRule)
	check("event_version", "0", versionRule)
	check("id", "0", intake.RuleID)
	check("id", "-5", intake.RuleID)
	check("id", "9000000000000000000", "")
	check("available_at", "now() + interval '8784 hours'", "")
	for _, at := range []string{"now() + interval '8785 hours'", "'0001-12-31 BC'", "'infinity'", "'-infinity'"} {
		check("available_at", at, availableRule)
	}
	for _, value := range []string{`{"a": ""}`, `{"a": " b "}`, `{"a": "\\"}`, `{"a": "]["}`} {
		check("headers", "'"+value+"'", "")
	}
	for _, value := range []string{`[]`, `null`, `"x"`, `1`, `{"a": 1}`, `{"a": null}`, `{"a": {}}`, `{"a": ["b"]}`, `{"a": "\n"}`, `{"a": "\u007f"}`} {
		check("headers", "'"+value+"'", headersRule)
	}
}

func printable() string {
	var all strings.Builder
	for c := byte('!'); c <= '~'; c++ {
		all.WriteByte(c)
	}
	return all.String()
}

// textGenerator draws printable text around the limits, a third of it with something odd somewhere.
var textGenerator = rapid.Custom(func(r *rapid.T) string {
	n := rapid.SampledFrom([]int{0, 1, 2, 3, 10, 254, 255, 256, 4000}).Draw(r, "length")
	text := slices.Repeat([]byte{rapid.ByteRange('!', '~').Draw(r, "letter")}, n)
	if n > 0 && rapid.IntRange(0, 2).Draw(r, "odd") == 0 {
		odd := rapid.SampledFrom([]string{" ", "\t", "\n", "\r\n", "\x00", "\x1f", "\x7f", "é", "\xff", `"`, `\`, ",", "{}", "NULL"}).Draw(r, "what")
		at := rapid.SampledFrom([]int{0, n / 2, n - 1}).Draw(r, "where")
		text = slices.Replace(text, at, at+1, []byte(odd)...)
	}
	return string(text)
})

// payloadGenerator draws JSON, and things that look like it.
var payloadGenerator = rapid.Custom(func(r *rapid.T) string {
	var payload strings.Builder
	for _, token := range rapid.SliceOfN(rapid.SampledFrom(jsonTokens), 1, 4).Draw(r, "tokens") {
		payload.WriteString(token)
	}
	return rapid.SampledFrom([]string{"", "[", `{"a":`}).Draw(r, "open") + payload.String() +
		rapid.SampledFrom([]string{"", "]", "}"}).Draw(r, "close")
})

var jsonTokens = []string{
	"{}", "[]", "{", "}", "[", "]", ",", ":", `"a"`, `"a":1`, `"a":1,"a":2`, `"\u0000"`, `"\ud800"`, `"\u12"`, `"\x"`, `"\/"`, `"é"`,
	"\"\x01\"", "\"\x7f\"", "\"\xff\"", "\"\xed\xa0\x80\"", "\"\n\"", `"`, `'a'`, "0", "-0", "01", "1.", ".5", "+1", "1e3", "1E+400", "1e",
	"-", "9007199254740993", "0x1", "NaN", "Infinity", "true", "True", "null", "nul", " ", "\n", "\r", "\t", "\f", "\v", "\u00a0", "\ufeff", "\x00", "//",
}

// Producers in other languages have docs/producing.md alone: it names each column that they may
// write, and each rule that refuses one.
func TestGuideForProducersIsComplete(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
	guide, err := os.ReadFile("../../../docs/producing.md")
	pgtest.Must(t, err)
	rows, err := pool.Query(t.Context(), `SELECT attname::text FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attnum > 0
		UNION SELECT conname::text FROM pg_constraint WHERE conrelid = 'outbox'::regclass AND contype NOT IN ('p', 'n')
		UNION SELECT conname::text FROM pg_constraint WHERE contypid <> 0 AND connamespace = 'public'::regnamespace`)
	pgtest.Must(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(names) < 15 {
		t.Fatalf("%d names: %v", len(names), err)
	}
	whenRouted := []string{
		intake.RuleAvailable, intake.RuleVersion, intake.RuleHeaders, intake.RuleID, intake.RuleOrdering, intake.RuleReference, intake.RulePayload,
	}
	for _, name := range append(names, whenRouted...) {
		if !strings.Contains(string(guide), "`"+name+"`") {
			t.Errorf("docs/producing.md does not name %s", name)
		}
	}
}

func event(key string) outbox.Event {
	return outbox.Event{Type: "invoice.issued", IdempotencyKey: key, Payload: json.RawMessage(`{"invoice":4711}`)}
}
