package pgtest_test

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

func TestNewIsolatesTests(t *testing.T) {
	t.Parallel()
	cases := map[string][]migrations.Set{
		"nothing":    nil,
		"outbox":     {migrations.Outbox},
		"inbox":      {migrations.Inbox},
		"both":       {migrations.Inbox, migrations.Outbox},
		"both again": {migrations.Outbox, migrations.Inbox},
	}
	for name, sets := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t, pgtest.New(t, sets...))
			for _, set := range []migrations.Set{migrations.Outbox, migrations.Inbox} {
				var has bool
				row := pool.QueryRow(t.Context(), "SELECT to_regclass($1) IS NOT NULL", set.VersionTable())
				pgtest.Must(t, row.Scan(&has))
				want := false
				for _, s := range sets {
					want = want || s == set
				}
				if has != want {
					t.Errorf("%s is present: %v, want %v", set.VersionTable(), has, want)
				}
			}
			if _, err := pool.Exec(t.Context(), "CREATE TABLE only_here ()"); err != nil {
				t.Errorf("the database is not fresh: %v", err)
			}
		})
	}
}

// BenchmarkNew measures what a database of its own costs a test.
func BenchmarkNew(b *testing.B) {
	for b.Loop() {
		pgtest.New(b, migrations.Outbox)
	}
}
