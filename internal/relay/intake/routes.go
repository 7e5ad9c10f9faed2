package intake

import (
	"cmp"
	"slices"
	"strings"
)

// A Route sends the event types that match Pattern to a destination. '*' stands for any characters,
// also none.
type Route struct{ Pattern, Destination string }

// Routes finds the destinations of an event type. What it costs grows with the lengths of the
// patterns and with those that begin and end with '*', not with their number. It is immutable and
// safe for concurrent use.
type Routes struct {
	exact map[string][]string
	// By what a pattern begins with before its first '*', and by what it ends with if it begins
	// with '*'. "*" itself is a prefix.
	prefix, suffix bucket
	// Patterns that begin and end with '*' and have more between.
	inner []pattern
}

// A bucket holds patterns by a literal, and the lengths that literals have, in ascending order.
type bucket struct {
	by      map[string][]pattern
	lengths []int
}

type pattern struct {
	parts []string // between the stars; nil: the literal alone decides
	to    []string
}

// NewRoutes indexes routes.
func NewRoutes(list []Route) *Routes {
	r := &Routes{exact: map[string][]string{}, prefix: bucket{by: map[string][]pattern{}}, suffix: bucket{by: map[string][]pattern{}}}
	sorted := slices.Clone(list)
	slices.SortFunc(sorted, func(a, b Route) int {
		return cmp.Or(cmp.Compare(a.Pattern, b.Pattern), cmp.Compare(a.Destination, b.Destination))
	})
	sorted = slices.Compact(sorted)
	for len(sorted) > 0 {
		text := sorted[0].Pattern
		var to []string
		for len(sorted) > 0 && sorted[0].Pattern == text {
			to, sorted = append(to, sorted[0].Destination), sorted[1:]
		}
		r.add(text, slices.Clip(to))
	}
	r.prefix.sort()
	r.suffix.sort()
	return r
}

func (r *Routes) add(text string, to []string) {
	parts := strings.Split(text, "*")
	first, last := parts[0], parts[len(parts)-1]
	p := pattern{parts: parts, to: to}
	switch {
	case len(parts) == 1:
		r.exact[text] = to
	case strings.Trim(text[len(first):], "*") == "": // "invoice.*", "*"
		r.prefix.add(first, pattern{to: to})
	case first != "":
		r.prefix.add(first, p)
	case last != "":
		r.suffix.add(last, p)
	default:
		r.inner = append(r.inner, p)
	}
}

func (b *bucket) add(literal string, p pattern) {
	if b.by[literal] == nil {
		b.lengths = append(b.lengths, len(literal))
	}
	b.by[literal] = append(b.by[literal], p)
}

func (b *bucket) sort() {
	slices.Sort(b.lengths)
	b.lengths = slices.Compact(b.lengths)
}

// Destinations returns where events of a type go, each once. The caller must not change the result.
func (r *Routes) Destinations(eventType string) []string {
	found := r.exact[eventType]
	several := false
	add := func(list []pattern) {
		for _, p := range list {
			if p.parts != nil && !p.matches(eventType) {
				continue
			}
			if found == nil {
				found = p.to
			} else {
				found, several = slices.Concat(found, p.to), true
			}
		}
	}
	for _, n := range r.prefix.lengths {
		if n > len(eventType) {
			break
		}
		add(r.prefix.by[eventType[:n]])
	}
	for _, n := range r.suffix.lengths {
		if n > len(eventType) {
			break
		}
		add(r.suffix.by[eventType[len(eventType)-n:]])
	}
	add(r.inner)
	if several {
		slices.Sort(found)
		found = slices.Compact(found)
	}
	return found
}

// matches reports whether the first part begins the text, the last one ends it, and the others
// stand between, in their order.
func (p *pattern) matches(text string) bool {
	rest, ok := strings.CutPrefix(text, p.parts[0])
	if !ok {
		return false
	}
	last := p.parts[len(p.parts)-1]
	if rest, ok = strings.CutSuffix(rest, last); !ok {
		return false
	}
	for _, part := range p.parts[1 : len(p.parts)-1] {
		if _, rest, ok = strings.Cut(rest, part); !ok {
			return false
		}
	}
	return true
}
