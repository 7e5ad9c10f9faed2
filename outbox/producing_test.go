package outbox_test

import (
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/intake"
)

// Producers in other languages have docs/producing.md alone: it names each column that they may write, and each rule that refuses one.
func TestGuideForProducersIsComplete(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
	guide, err := os.ReadFile("../docs/producing.md")
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
