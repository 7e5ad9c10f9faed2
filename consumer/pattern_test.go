package consumer

import (
	"regexp"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

// expression is what a pattern stands for, as package regexp has it.
func expression(t testing.TB, pattern string) *regexp.Regexp {
	t.Helper()
	re, err := regexp.Compile(`\A(?s:` + strings.ReplaceAll(regexp.QuoteMeta(pattern), `\*`, `.*`) + `)\z`)
	pgtest.Must(t, err)
	return re
}

func TestMatch(t *testing.T) {
	t.Parallel()
	texts := []string{"", "a", "b", "aa", "ab", "ba", "aba", "abab", "abba", "a.b", "a%b", "a_b", `a\b`, "a*b", "aaaaaaaaab"}
	for _, pattern := range []string{"*", "**", "a", "a*", "*a", "*a*", "a*b", "a*a", "*ab*ba*", "a.b", "a%b", "a_b", `a\b`, "a**b", "*a*a*a*a*a*b", "ab*ab"} {
		for _, text := range texts {
			if got, want := match(pattern, text), expression(t, pattern).MatchString(text); got != want {
				t.Errorf("match(%q, %q) = %v, want %v", pattern, text, got, want)
			}
		}
	}
}

func TestOverlap(t *testing.T) {
	t.Parallel()
	// Two patterns of up to three characters overlap if a text of up to six matches both.
	words := func(alphabet string, n int) (all []string) {
		all = []string{""}
		for last := all; n > 0; n-- {
			var next []string
			for _, word := range last {
				for _, c := range alphabet {
					next = append(next, word+string(c))
				}
			}
			all, last = append(all, next...), next
		}
		return all
	}
	texts := words("ab", 6)
	for _, a := range words("ab*", 3) {
		for _, b := range words("ab*", 3) {
			want := false
			for _, text := range texts {
				want = want || match(a, text) && match(b, text)
			}
			if got := overlap(a, b); got != want {
				t.Errorf("overlap(%q, %q) = %v, want %v", a, b, got, want)
			}
		}
	}
}

// FuzzPattern holds match against package regexp, and overlap against match.
func FuzzPattern(f *testing.F) {
	f.Add("invoice.*", "invoice.created", "*.created")
	f.Add("*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "a*")
	f.Add("**", "", "")
	f.Add("a\xff*", "a\xff\xfe", "*\xfe")
	f.Fuzz(func(t *testing.T, pattern, text, other string) {
		if len(pattern)+len(text)+len(other) > 3*headers.MaxTextBytes {
			return // longer than what is registered or sent
		}
		matched := match(pattern, text)
		if headers.Printable(pattern) && headers.Printable(text) && matched != expression(t, pattern).MatchString(text) {
			t.Errorf("match(%q, %q) = %v", pattern, text, matched)
		}
		if matched && match(other, text) && !(overlap(pattern, other) && overlap(other, pattern)) {
			t.Errorf("%q and %q both match %q, yet do not overlap", pattern, other, text)
		}
		if !isGlob(pattern) && matched != (pattern == text) {
			t.Errorf("%q matches %q", pattern, text)
		}
	})
}
