package pg

import (
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What fails alone is found with few statements, and all else is done once.
func TestApart(t *testing.T) {
	t.Parallel()
	reported := func(severity, code string) error { return &pgconn.PgError{SeverityUnlocalized: severity, Code: code} }
	damaged, locked, away := reported("ERROR", "XX001"), reported("ERROR", LockNotAvailable), errors.New("unexpected EOF")
	fatal := reported("FATAL", "XX000")
	numbers := make([]int, 1000)
	for i := range numbers {
		numbers[i] = i
	}
	for name, c := range map[string]struct {
		bad   []int
		with  error
		want  error
		done  int
		alone int
		calls int // at most
	}{
		"nothing":    {done: 1000, calls: 1},
		"one":        {bad: []int{321}, with: damaged, done: 999, alone: 1, calls: 21},
		"two":        {bad: []int{0, 999}, with: damaged, done: 998, alone: 2, calls: 41},
		"everything": {bad: numbers, with: damaged, alone: 1000, calls: 200},
		"a lock":     {bad: []int{5}, with: locked, want: locked, calls: 1},
		"a lost one": {bad: []int{5}, with: fatal, want: fatal, calls: 1},
		"no server":  {bad: []int{5}, with: away, want: away, calls: 1},
	} {
		var done, alone []int
		calls := 0
		err := Apart(numbers, func(part []int) error {
			calls++
			if slices.ContainsFunc(part, func(n int) bool { return slices.Contains(c.bad, n) }) {
				return c.with
			}
			done = append(done, part...)
			return nil
		}, func(n int, err error) {
			testkit.Equal(t, name, err, c.with)
			alone = append(alone, n)
		})
		if !errors.Is(err, c.want) || len(done) != c.done || len(alone) != c.alone || calls > c.calls {
			t.Errorf("%s: %v, %d done, %d alone, %d calls", name, err, len(done), len(alone), calls)
		}
	}
	if err := Apart(nil, func([]int) error { return away }, nil); err != nil {
		t.Errorf("an empty list: %v", err)
	}
}
