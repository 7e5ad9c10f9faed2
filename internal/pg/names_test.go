package pg

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A statement names the schema of each table and function of ours, and stays as it is otherwise.
func TestStatementsNameTheirSchema(t *testing.T) {
	t.Parallel()
	n := NewNames(`odd "one"`, "")
	for statement, want := range map[string]string{
		`SELECT d.outbox FROM outbox_delivery d, outbox WHERE outbox.id = 1`:                         `SELECT d.outbox FROM "odd ""one""".outbox_delivery d, "odd ""one""".outbox WHERE "odd ""one""".outbox.id = 1`,
		"SELECT 1 -- a relay's outbox\nFROM outbox_relay":                                            "SELECT 1 -- a relay's outbox\nFROM \"odd \"\"one\"\"\".outbox_relay",
		`SELECT outbox_is_routed($1), pg_notify('outbox_wake', 'it''s outbox ' || current_schema())`: `SELECT "odd ""one""".outbox_is_routed($1), pg_notify('outbox_wake', 'it''s outbox ' || 'odd "one"'::pg_catalog.text)`,
		`SELECT 'outbox'::regclass, to_regclass('outbox_relay')`:                                     `SELECT '"odd ""one""".outbox'::pg_catalog.regclass, pg_catalog.to_regclass('"odd ""one""".outbox_relay')`,
		`SELECT inbox_id FROM inbox_events JOIN processed_events USING (source)`:                     `SELECT inbox_id FROM "odd ""one""".inbox_events JOIN "odd ""one""".processed_events USING (source)`,
		`SELECT * FROM shop.outbox, "outbox", E'outbox\n'`:                                           `SELECT * FROM shop.outbox, "outbox", E'outbox\n'`,
		`LISTEN outbox_wake`: `LISTEN outbox_wake`,
	} {
		for range 2 { // the second time it is remembered
			if got := n.In(statement); got != want {
				t.Errorf("%s\nis  %s\nnot %s", statement, got, want)
			}
		}
		testkit.Equal(t, "written twice", n.In(want), want)
		testkit.Equal(t, "an unknown schema is written", NewNames("", "outbox").In(statement), statement)
	}
}
