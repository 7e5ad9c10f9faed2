package rows_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

func TestRows(t *testing.T) {
	db := pgtest.Pool(t, pgtest.New(t))
	type pair struct {
		Number int
		Name   string
	}
	pairs, err := rows.Structs[pair](t.Context(), db, "list pairs", "SELECT n, 'name ' || n FROM generate_series(1, $1::int) n", 2)
	if err != nil || !slices.Equal(pairs, []pair{{1, "name 1"}, {2, "name 2"}}) {
		t.Errorf("got %v, %v", pairs, err)
	}
	none, err := rows.Values[string](t.Context(), db, "list names", "SELECT 'a' WHERE false")
	if err != nil || none == nil || len(none) > 0 {
		t.Errorf("got %#v, %v; want no rows, and not nil", none, err)
	}
	if one, err := rows.Value[string](t.Context(), db, "read name", "SELECT 'name ' || n FROM generate_series(1, $1::int) n", 2); err != nil || one != "name 1" {
		t.Errorf("got %q, %v", one, err)
	}
	if _, err := rows.Value[string](t.Context(), db, "read name", "SELECT 'a' WHERE false"); !errors.Is(err, pgx.ErrNoRows) || !strings.HasPrefix(err.Error(), "read name: ") {
		t.Errorf("without a row: %v", err)
	}
	for name, statement := range map[string]string{"a statement that fails": "SELECT 1/0", "another type": "SELECT 'text'"} {
		if list, err := rows.Values[int](t.Context(), db, "list numbers", statement); err == nil || list != nil || !strings.HasPrefix(err.Error(), "list numbers: ") {
			t.Errorf("%s: got %v, %v", name, list, err)
		}
	}
}
