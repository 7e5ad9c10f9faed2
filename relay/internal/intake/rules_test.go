package intake

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	outboxes "github.com/outbox-relay/outbox-relay/migrations"
)

// The relay finds what the trigger found, under the same name: each event that the old trigger refuses, in the words of its SQL function.
func TestRulesAreThoseOfTheTrigger(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	// Only the owner can write what a domain refuses.
	r.Exec(`ALTER DOMAIN outbox_event_type DROP CONSTRAINT outbox_event_type_is_1_to_255_printable_ascii_no_blanks;
		ALTER DOMAIN outbox_idempotency_key DROP CONSTRAINT outbox_idempotency_key_is_1_to_255_printable_ascii`)
	long := strings.Repeat("x", 255)
	texts := []string{"", "a", "a b", " a", "a ", " ", "a\t", "é", "~", long, long + "x", "\x7f", "!"}
	n := 0
	insert := func(column, value string) {
		n++
		columns := map[string]string{
			"event_type": `'t'`, "payload": `'{}'`, "idempotency_key": fmt.Sprintf("'key-%d'", n), "ordering_key": "NULL", "related_reference": "NULL",
			"event_version": "1", "headers": "'{}'", "available_at": "now()", "id": fmt.Sprint(n),
		}
		columns[column] = value
		var names, values []string
		for name, value := range columns {
			names, values = append(names, name), append(values, value)
		}
		r.Exec(`INSERT INTO outbox (` + strings.Join(names, ", ") + `) OVERRIDING SYSTEM VALUE VALUES (` + strings.Join(values, ", ") + `)`)
	}
	for _, text := range texts {
		for _, column := range []string{"event_type", "ordering_key", "related_reference", "idempotency_key"} {
			insert(column, "'"+text+"'")
		}
	}
	for _, version := range []string{"1", "0", "-1", "2147483647"} {
		insert("event_version", version)
	}
	for _, id := range []string{"0", "-5", "9000000000000000000"} {
		insert("id", id)
	}
	for _, at := range []string{"now() + interval '365 days'", "now() + interval '8784 hours'", "now() + interval '8785 hours'", "'0001-01-01 00:00:00+00'", "'0001-12-31 BC'", "'infinity'", "'-infinity'"} {
		insert("available_at", at)
	}
	for _, payload := range []string{"'null'", "repeat(' ', 1048575)::text::json", "(repeat(' ', 1048575) || '1')::json", "(repeat(' ', 1048576) || '1')::json"} {
		if payload == "repeat(' ', 1048575)::text::json" { // no JSON
			continue
		}
		insert("payload", payload)
	}
	for _, headers := range []string{
		`{}`, `[]`, `null`, `"x"`, `1`, `{"a": "b"}`, `{"a": 1}`, `{"a": null}`, `{"a": {}}`, `{"a": ["b"]}`, `{"": "b"}`, `{"a b": "c"}`, `{"a:": "c"}`,
		`{"a": ""}`, `{"a": " b "}`, `{"a": "b\\\"c"}`, `{"a": "\\\\"}`, `{"a": "\\n"}`, `{"a": "é"}`, `{"é": "a"}`, `{"a": "\u007f"}`, `{"a": "]["}`,
		`{"a": "x", "b": "y", "Z-9_~|^.+*&%$#!": "ok"}`, `{"host": "a"}`, `{"Host": "a"}`, `{"X_Real.IP": "a"}`, `{"x-outbox-y": "a"}`, `{"proxy": "a"}`,
		`{"proxying": "a"}`, `{"traceparent": "00"}`, `{"content_type": "a"}`, `{"a": "true", "te": "x"}`, `{"x-forwarded-": "a"}`, `{"a": "\", \"host\": \""}`,
	} {
		insert("headers", "'"+headers+"'")
	}
	for _, size := range []int{8183, 8184, 8185} {
		insert("headers", fmt.Sprintf(`jsonb_build_object('a', repeat('x', %d))`, size))
	}

	got := map[string]string{}
	for _, e := range r.take(1, Terms{Events: 1000, Bytes: 1 << 30}).Events {
		got[*e.Key+fmt.Sprint(e.ID)] = BrokenRule(&e)
	}
	db := stdlib.OpenDBFromPool(r.Pool)
	defer db.Close()
	migrator, err := outboxes.New(db, outboxes.Outbox, outboxes.Options{})
	relaytest.Must(t, err)
	_, err = migrator.DownTo(t.Context(), 15) // which brings the trigger's functions back
	relaytest.Must(t, err)
	r.Exec(`CREATE FUNCTION rule_of(o outbox) RETURNS text LANGUAGE plpgsql AS $$
		DECLARE rule text;
		BEGIN
			PERFORM outbox_check_event(o.id, o.event_type, o.event_version, o.payload, o.idempotency_key, o.ordering_key, o.related_reference, o.headers, o.available_at);
			RETURN '';
		EXCEPTION WHEN check_violation THEN
			GET STACKED DIAGNOSTICS rule = CONSTRAINT_NAME;
			RETURN rule;
		END $$`)
	rows := relaytest.Rows[[]string](r.Database, `SELECT ARRAY[o.idempotency_key || o.id, rule_of(o.*),
		left(concat_ws(' ', o.event_type, o.headers, o.available_at), 60)] FROM outbox o`)
	rules := map[string]int{}
	for _, row := range rows {
		rules[row[1]]++
		if found, taken := got[row[0]]; !taken || found != row[1] {
			t.Errorf("%.80q breaks %q, the trigger says %q (%s)", row[0], found, row[1], row[2])
		}
	}
	if len(rows) != n || len(rules) != 10 {
		t.Errorf("%d events, want %d; rules: %v", len(rows), n, rules)
	}
}
