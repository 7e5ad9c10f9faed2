package batch

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestChunksEndWithTheLastOneOrAnError(t *testing.T) {
	broken, left := errors.New("broken"), errors.New("left")
	stopped, stop := context.WithCancelCause(t.Context())
	stop(left)
	for name, c := range map[string]struct {
		ctx    context.Context
		failAt int
		want   []int
		err    error
	}{
		"all of them":         {ctx: t.Context(), want: []int{1, 2, 3}},
		"an error":            {ctx: t.Context(), failAt: 2, want: []int{1}, err: broken},
		"a context that ends": {ctx: stopped, err: left},
	} {
		var got []int
		var failed error
		asked := 0
		for chunk, err := range Chunks(c.ctx, func() ([]int, bool, error) {
			asked++
			if asked == c.failAt {
				return nil, true, broken
			}
			return []int{asked}, asked < 3, nil
		}) {
			got, failed = append(got, chunk...), err
		}
		if !slices.Equal(got, c.want) || !errors.Is(failed, c.err) {
			t.Errorf("%s: got %v, %v", name, got, failed)
		}
	}
}

func TestCounts(t *testing.T) {
	var c Counts
	if c.Changed(10, 7); c != (Counts{Matched: 10, Done: 7, Missed: 3}) {
		t.Errorf("%+v", c)
	}
	if !c.Found(5) || c.More || c.Matched != 15 {
		t.Errorf("%+v", c)
	}
	if c.Found(CountLimit) || !c.More {
		t.Errorf("it counts beyond the limit: %+v", c)
	}
	var kinds map[string]int64
	for _, kind := range []string{"failed", "parked", "failed"} {
		Count(&kinds, kind)
	}
	if kinds["failed"] != 2 || kinds["parked"] != 1 {
		t.Errorf("%v", kinds)
	}
}

func TestSelections(t *testing.T) {
	if err := CheckChosen("status", []string{"failed"}, []string{"failed", "parked"}); err != nil {
		t.Error(err)
	}
	if err := CheckChosen("status", []string{"faild"}, []string{"failed", "parked"}); err == nil || err.Error() != `status "faild" cannot be chosen; choose failed, parked` {
		t.Error(err)
	}
	testkit.Equal(t, "found", LikePattern(`a_b%c\d.*`), `a\_b\%c\\d.%`)
}
