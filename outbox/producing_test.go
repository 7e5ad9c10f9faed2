package outbox_test

import (
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Producers in other languages have docs/producing.md alone: it names each column that they may write, and each rule that refuses one.
func TestGuideForProducersIsComplete(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
	guide, err := os.ReadFile("../docs/producing.md")
	if err != nil {
		t.Fatal(err)
	}
	rows, err := pool.Query(t.Context(), `SELECT attname::text FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attnum > 0
		UNION SELECT m[1] FROM pg_proc, regexp_matches(prosrc, '''(outbox_[a-z0-9_]+)''', 'g') m WHERE proname = 'outbox_check_event'
		UNION SELECT conname::text FROM pg_constraint WHERE conrelid = 'outbox'::regclass AND contype NOT IN ('p', 'n')
		UNION SELECT conname::text FROM pg_constraint WHERE contypid = 'outbox_created_at'::regtype`)
	if err != nil {
		t.Fatal(err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(names) < 21 {
		t.Fatalf("%d names: %v", len(names), err)
	}
	for _, name := range names {
		if !strings.Contains(string(guide), "`"+name+"`") {
			t.Errorf("docs/producing.md does not name %s", name)
		}
	}
}
