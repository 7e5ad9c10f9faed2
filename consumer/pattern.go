package consumer

import (
	"strings"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
)

// validPattern reports whether a pattern follows the rule of outbox_route: 1 to 255 printable ASCII
// characters without blanks.
func validPattern(pattern string) bool {
	return headers.Printable(pattern) && !strings.Contains(pattern, " ")
}

func isGlob(pattern string) bool { return strings.Contains(pattern, "*") }

// literals returns the number of characters that are not '*'.
func literals(pattern string) int { return len(pattern) - strings.Count(pattern, "*") }

// match reports whether a pattern matches text. '*' matches any run of characters. match backtracks
// to the last '*' only, so it takes at most len(pattern) × len(text) steps.
func match(pattern, text string) bool {
	p, t := 0, 0
	star, resume := -1, 0 // where the last '*' stands, and where what follows it is tried next
	for t < len(text) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, resume = p, t
			p++
		case p < len(pattern) && pattern[p] == text[t]:
			p++
			t++
		case star >= 0:
			resume++
			p, t = star+1, resume
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

// overlap reports whether some text matches both patterns.
func overlap(a, b string) bool {
	// reach[j] reports whether the part of a read so far and the first j characters of b match a
	// common text.
	reach := make([]bool, len(b)+1)
	reach[0] = true
	for j := range len(b) {
		reach[j+1] = reach[j] && b[j] == '*'
	}
	for i := range len(a) {
		before := reach[0] // of the previous row, one to the left of above
		reach[0] = before && a[i] == '*'
		for j := range len(b) {
			above := reach[j+1]
			if a[i] == '*' || b[j] == '*' {
				reach[j+1] = above || reach[j] // a '*' is empty, or takes in the other's last character
			} else {
				reach[j+1] = before && a[i] == b[j]
			}
			before = above
		}
	}
	return reach[len(b)]
}
