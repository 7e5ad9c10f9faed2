// Package batch is what commands share that change many rows, a batch at a time: deliveries of an
// outbox, or events of an inbox.
package batch

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
)

const (
	// Size is how many rows one transaction changes at most.
	Size = 1000
	// SampleSize is how many rows a preview shows.
	SampleSize = 5
	// CountLimit is up to how many rows a preview counts.
	CountLimit = 1_000_000
)

// Counts are what a command found and did.
type Counts struct {
	// Matched by the selection, and free to be changed.
	Matched int64 `json:"matched"`
	// More of them exist than were counted.
	More bool `json:"more,omitempty"`
	// Done of the matched were changed.
	Done int64 `json:"done"`
	// Missed ones were left alone: another session changed or locked them meanwhile.
	Missed int64 `json:"missed"`
}

// Found adds rows that a preview found, and reports whether it is to count further.
func (c *Counts) Found(rows int) (goOn bool) {
	c.Matched += int64(rows)
	c.More = c.Matched >= CountLimit
	return !c.More
}

// Changed adds a batch of rows, and how many of them were changed.
func (c *Counts) Changed(rows int, done int64) {
	c.Matched += int64(rows)
	c.Done += done
	c.Missed += int64(rows) - done
}

// Count adds one to those of a kind.
func Count(counts *map[string]int64, kind string) {
	if *counts == nil {
		*counts = map[string]int64{}
	}
	(*counts)[kind]++
}

// CheckChosen returns an error if one of the chosen statuses or states is not among the allowed
// ones. what says which of both they are.
func CheckChosen(what string, chosen, allowed []string) error {
	for _, name := range chosen {
		if !slices.Contains(allowed, name) {
			return fmt.Errorf("%s %q cannot be chosen; choose %s", what, name, strings.Join(allowed, ", "))
		}
	}
	return nil
}

// LikePattern turns a pattern in which only '*' is special into one for LIKE, as outbox_route does.
func LikePattern(pattern string) string {
	return strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`, `*`, `%`).Replace(pattern)
}

// Chunks yields what next returns, chunk by chunk, until there is no more. An error is the last
// thing that it yields: that of next, or why ctx ended.
func Chunks[T any](ctx context.Context, next func() (chunk []T, more bool, err error)) iter.Seq2[[]T, error] {
	return func(yield func([]T, error) bool) {
		for more := true; more; {
			err := context.Cause(ctx)
			var chunk []T
			if err == nil {
				chunk, more, err = next()
			}
			if !yield(chunk, err) || err != nil {
				return
			}
		}
	}
}
