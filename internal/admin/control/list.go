package control

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// A List chooses the destinations of an [Overview]. The zero value chooses the first
// [ops.MaxListed].
type List struct {
	// Sort is the column that orders them: names up, states from the worst, numbers down. Empty:
	// the order of [ops.List].
	Sort string
	// Prefix, After and Limit are those of [ops.List].
	Prefix, After string
	Limit         int
}

// ListNames are the parameters of a list of destinations.
func ListNames() []string { return []string{"prefix", "sort", "after", "limit"} }

// SortNames are the values of the parameter sort.
func SortNames() []string {
	return []string{"name", "state", "delivered", "pending", "retrying", "failed", "lag", "p95"}
}

// ParseList reads which destinations to list from the parameters of a request. The error is a
// [check.Problem].
func ParseList(q url.Values) (l List, err error) {
	l = List{Sort: q.Get("sort"), Prefix: q.Get("prefix"), After: q.Get("after")}
	if l.Sort != "" && !slices.Contains(SortNames(), l.Sort) {
		return l, check.Problem{Path: "sort", Text: fmt.Sprintf("%q is not known; choose %s", plain.Clip(l.Sort), strings.Join(SortNames(), ", "))}
	}
	for _, name := range []string{"prefix", "after"} {
		if strings.ContainsRune(q.Get(name), 0) {
			return l, check.Problem{Path: name, Text: "contains a NUL"}
		}
	}
	l.Limit, err = ParseLimit(q)
	return l, err
}

// ParseLimit reads the parameter limit; 0: it is not given. The error is a [check.Problem].
func ParseLimit(q url.Values) (limit int, err error) {
	text := q.Get("limit")
	if text == "" {
		return 0, nil
	}
	if limit, err = strconv.Atoi(text); err != nil || limit < 1 || limit > maxPage {
		return 0, check.Problem{Path: "limit", Text: fmt.Sprintf("%q is not a number from 1 to %d", text, maxPage)}
	}
	return limit, nil
}

// ParseRange reads from the parameters of a request how many items of a list to skip, and how many
// to list at most. The error is a [check.Problem].
func ParseRange(q url.Values) (skip, limit int, err error) {
	if limit, err = ParseLimit(q); err != nil {
		return 0, 0, err
	}
	if text := q.Get("skip"); text != "" {
		if skip, err = strconv.Atoi(text); err != nil || skip < 0 {
			return 0, 0, check.Problem{Path: "skip", Text: fmt.Sprintf("%q is not a number from 0", plain.Clip(text))}
		}
	}
	return skip, cmp.Or(limit, ops.MaxListed), nil
}

// sortsByHistory reports whether the order needs the last hour of all destinations.
func (l List) sortsByHistory() bool { return l.Sort == "delivered" || l.Sort == "p95" }

// of returns the list with its order. past has what the order needs of the history.
func (l List) of(past pasts) ops.List {
	down := func(number func(ops.DestinationStatus) float64) func(a, b ops.DestinationStatus) int {
		return func(a, b ops.DestinationStatus) int { return cmp.Compare(number(b), number(a)) }
	}
	return ops.List{
		Prefix: l.Prefix, After: l.After, Limit: l.Limit, ByName: l.Sort == "name",
		Compare: map[string]func(a, b ops.DestinationStatus) int{
			"state":     down(func(d ops.DestinationStatus) float64 { return badness(d.State) }),
			"delivered": down(func(d ops.DestinationStatus) float64 { return float64(past.of(d.Destination).Sum.Delivered) }),
			"pending":   down(func(d ops.DestinationStatus) float64 { return float64(d.Pending) }),
			"retrying":  down(func(d ops.DestinationStatus) float64 { return float64(d.Retrying) }),
			"failed":    down(func(d ops.DestinationStatus) float64 { return float64(d.Failed) }),
			"lag":       down(func(d ops.DestinationStatus) float64 { return d.LagSeconds }),
			"p95": down(func(d ops.DestinationStatus) float64 {
				if p95 := past.of(d.Destination).Sum.Response.P95; p95 != nil {
					return *p95
				}
				return -1
			}),
		}[l.Sort],
	}
}

// badness ranks the states of destinations: nothing is sent, or it is refused; a person should
// look; all is well.
func badness(state string) float64 {
	switch state {
	case "ok":
		return 0
	case "held", "failing", "unserved":
		return 2
	}
	return 1
}
