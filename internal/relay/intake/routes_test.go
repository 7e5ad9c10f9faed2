package intake

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// like is what PostgreSQL's LIKE does with the pattern of outbox_route.
func like(text, pattern string) bool {
	if pattern == "" {
		return text == ""
	}
	if pattern[0] == '*' {
		return like(text, pattern[1:]) || text != "" && like(text[1:], pattern)
	}
	return text != "" && text[0] == pattern[0] && like(text[1:], pattern[1:])
}

// wanted compares with one route after the other.
func wanted(list []Route, eventType string) (to []string) {
	for _, r := range list {
		if like(eventType, r.Pattern) && !slices.Contains(to, r.Destination) {
			to = append(to, r.Destination)
		}
	}
	slices.Sort(to)
	return to
}

func TestRoutesMatchAsLike(t *testing.T) {
	t.Parallel()
	text := rapid.StringOfN(rapid.SampledFrom([]rune(`ab.%_\`)), 0, 6, -1)
	pattern := rapid.StringOfN(rapid.SampledFrom([]rune(`ab.%_\***`)), 1, 6, -1)
	rapid.Check(t, func(t *rapid.T) {
		var list []Route
		for range rapid.IntRange(0, 12).Draw(t, "routes") {
			list = append(list, Route{pattern.Draw(t, "pattern"), rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "to")})
		}
		r := NewRoutes(list)
		for range 8 {
			eventType := text.Draw(t, "type")
			if got := r.Destinations(eventType); !slices.Equal(got, wanted(list, eventType)) {
				t.Fatalf("%q goes to %q, want %q by %v", eventType, got, wanted(list, eventType), list)
			}
		}
	})
}

func FuzzRoutes(f *testing.F) {
	f.Add("invoice.*", "*.paid", "invoice.paid")
	f.Add("a*a", "*", "a")
	f.Add("*b*", "a**b*c", "axbxc")
	f.Fuzz(func(t *testing.T, one, two, eventType string) {
		if len(one)+len(two)+len(eventType) > 40 || one == "" || two == "" {
			return
		}
		list := []Route{{one, "x"}, {two, "y"}, {two, "x"}}
		if got := NewRoutes(list).Destinations(eventType); !slices.Equal(got, wanted(list, eventType)) {
			t.Errorf("%q goes to %q by %q", eventType, got, list)
		}
	})
}

// The test's own idea of LIKE is PostgreSQL's.
func TestLike(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	patterns := []string{"*", "a", "a*", "*a", "a*b", "*a*", "a**b", `a\b`, "a%", "a_", `\*`, "a*a", "*.*", "a.*.c", "a*b*c", "**", "*.b.*", "a_c", `a\c`, "a*bc*c", "abc*abc", "A*"}
	types := []string{"a", "ab", "aa", "aab", "ba", `a\b`, "a%", "ab", "a_", `\x`, "a.b", "a.b.c", ".", "b", "abc", "axbyc", "abcabc", "a_c", "axc", `a\c`, "abcc", "abcbc", "A"}
	db.Exec(`INSERT INTO outbox_route (pattern, destination) SELECT unnest($1::text[]), 'x' ON CONFLICT DO NOTHING`, patterns)
	for _, eventType := range types {
		got := relaytest.Rows[string](db, `SELECT DISTINCT pattern FROM outbox_route WHERE $1 LIKE like_pattern ORDER BY pattern`, eventType)
		var want []string
		for _, p := range patterns {
			if like(eventType, p) {
				want = append(want, p)
			}
		}
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", eventType, got, want)
		}
	}
}

// How many patterns are tried does not grow with the number of routes.
func TestManyRoutes(t *testing.T) {
	t.Parallel()
	r := NewRoutes(manyRoutes(3000))
	testkit.Equal(t, "goes to", r.Destinations("order77.paid"), []string{"audit", "d77"})
	if n := len(r.prefix.lengths); n > 6 {
		t.Errorf("%d lengths are tried", n)
	}
	for literal, list := range r.prefix.by {
		if len(list) > 1 {
			t.Errorf("%d patterns are tried after %q", len(list), literal)
		}
	}
	if r.Destinations("") != nil && !slices.Equal(r.Destinations(""), []string{"audit"}) {
		t.Error("an empty type")
	}
}

func manyRoutes(n int) []Route {
	list := []Route{{"*", "audit"}}
	for i := range n {
		switch i % 3 {
		case 0:
			list = append(list, Route{fmt.Sprintf("exact%d", i), "d"})
		default:
			list = append(list, Route{fmt.Sprintf("order%d.*", i), fmt.Sprintf("d%d", i)})
		}
	}
	return list
}

func BenchmarkRoutes(b *testing.B) {
	for _, n := range []int{1, 1000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r := NewRoutes(append(manyRoutes(n), Route{"order1.*", "d1"}))
			eventType := "order1.paid"
			b.ReportAllocs()
			for b.Loop() {
				r.Destinations(eventType)
			}
		})
	}
}
