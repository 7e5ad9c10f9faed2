package batch

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestPacedRepeatsSteps(t *testing.T) {
	t.Parallel()
	locked, broken := &pgconn.PgError{Code: "55P03"}, errors.New("broken")
	for name, c := range map[string]struct {
		ready error
		steps []error // what they return one after the other; the last has nothing more to do
		want  error
		asked int
	}{
		"until there is no more":      {steps: []error{nil, nil, nil}, asked: 3},
		"also after a lock":           {steps: []error{locked, nil}, asked: 2},
		"not after five in a row":     {steps: []error{locked, locked, locked, locked, locked, locked, nil}, want: locked, asked: 6},
		"five, and five after a step": {steps: []error{locked, locked, locked, locked, locked, nil, locked, locked, locked, locked, locked, nil}, asked: 12},
		"not after another error":     {steps: []error{broken, nil}, want: broken, asked: 1},
		"not while it is not ready":   {ready: broken, want: broken},
	} {
		asked := 0
		err := Paced(t.Context(), func() error { return c.ready }, func() (bool, error) {
			asked++
			return asked < len(c.steps), c.steps[asked-1]
		})
		if !errors.Is(err, c.want) || asked != c.asked {
			t.Errorf("%s: %d steps, %v", name, asked, err)
		}
	}
}

func TestPacedEndsInARest(t *testing.T) {
	t.Parallel()
	left := errors.New("left")
	ctx, stop := context.WithCancelCause(t.Context())
	err := Paced(ctx, func() error { return nil }, func() (bool, error) {
		stop(left)
		return true, nil
	})
	if !errors.Is(err, left) {
		t.Error(err)
	}
}
