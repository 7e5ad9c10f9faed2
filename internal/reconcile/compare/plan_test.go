package compare

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// No statement reads a whole table for a page or a range, also with statistics from when the tables
// were empty.
func TestStatementsWalkIndexes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`ANALYZE`)
	db.Fill(2000, 90)
	to, now := []string{"default"}, time.Now()
	pgtest.Must(t, within(t.Context(), db.Pool, func(tx pgx.Tx) error {
		for what, statement := range map[string]struct {
			text string
			args []any
		}{
			"the end of a page": {selectEnd, []any{1000, 500}},
			"a page":            {selectPage, []any{1000, 1500, to, now, now, now}},
			"a list":            {selectAfter, []any{"k", to, 100}},
			"some keys":         {selectKeys, []any{[]string{"a", "b"}, to}},
			"bounds":            {selectBounds, []any{100}},
		} {
			e := relaytest.Explain(t, tx, statement.text, statement.args...)
			for line := range strings.Lines(e.Plan) {
				if strings.Contains(line, "Seq Scan on outbox") && !strings.Contains(line, "outbox_archive") {
					t.Errorf("%s:\n%s", what, e.Plan)
				}
			}
		}
		return nil
	}))
}
