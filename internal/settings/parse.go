package settings

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// splitList splits what a variable or an item of a list holds: several values, separated by commas.
func splitList(text string) []string {
	parts := strings.Split(text, ",")
	for i := range parts {
		parts[i] = strings.TrimSpace(parts[i])
	}
	return parts
}

var (
	bareNumber    = regexp.MustCompile(`^-?[0-9]+(\.[0-9]+)?$`)
	longUnits     = regexp.MustCompile(`^([0-9]{1,4})([dw])$`)
	knownDuration = regexp.MustCompile(`^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`)
)

// ParseDuration parses a duration above zero.
func ParseDuration(text string) (time.Duration, string) {
	d, err := time.ParseDuration(text)
	compact := strings.ToLower(strings.Join(strings.Fields(text), ""))
	_, compactErr := time.ParseDuration(compact)
	switch {
	case text == "":
		return 0, `is empty; write a duration such as "5s"`
	case bareNumber.MatchString(text):
		return 0, fmt.Sprintf(`%s has no unit; write "%ss"`, Quote(text), strings.TrimPrefix(text, "-"))
	case err == nil && d <= 0:
		return 0, fmt.Sprintf(`%s is not more than zero; write a duration such as "5s"`, Quote(text))
	case err == nil:
		return d, ""
	case longUnits.MatchString(text):
		return 0, fmt.Sprintf(`%s uses a unit longer than hours; write "%s"`, Quote(text), inHours(longUnits.FindStringSubmatch(text)))
	case knownDuration.MatchString(text):
		return 0, Quote(text) + " is too long; the longest duration is 2562047h"
	case compactErr == nil && compact != text:
		return 0, fmt.Sprintf("%s is not a duration; write %q", Quote(text), compact)
	}
	return 0, Quote(text) + ` is not a duration; write one such as "5s", "15m" or "24h"`
}

// inHours turns the parts of a text such as "3d" into hours.
func inHours(parts []string) string {
	n, _ := strconv.Atoi(parts[1])
	if parts[2] == "w" {
		n *= 7
	}
	return strconv.Itoa(n*24) + "h"
}

// ParseNumber parses a whole number.
func ParseNumber(text string) (int, string) {
	n, err := strconv.ParseInt(text, 10, 32)
	switch {
	case text == "":
		return 0, "is empty; write a whole number"
	case err != nil:
		return 0, Quote(text) + " is not a whole number"
	}
	return int(n), ""
}

// ParseCount parses a whole number from 1.
func ParseCount(text string) (int, string) {
	n, problem := ParseNumber(text)
	if problem == "" && n < 1 {
		problem = Quote(text) + " is too small; write 1 or more"
	}
	return n, problem
}

// ParseFraction returns a parser of finite numbers. advice ends the message about another text.
func ParseFraction(advice string) Parser[float64] {
	return func(text string) (float64, string) {
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			return 0, Quote(text) + " is not a number; " + advice
		}
		return f, ""
	}
}

// ParseBool parses true or false.
func ParseBool(text string) (bool, string) {
	if text == "true" || text == "false" {
		return text == "true", ""
	}
	return false, Quote(text) + " is neither true nor false"
}

// ParseText parses a text that is not empty and has no control characters.
func ParseText(text string) (string, string) {
	switch {
	case text == "":
		return "", "is empty"
	case hasControl(text):
		return "", "contains a control character, such as a line break"
	}
	return text, ""
}

// ParseSecret parses a text as ParseText does.
func ParseSecret(text string) (Secret, string) {
	plain, problem := ParseText(text)
	return Secret(plain), problem
}

// ParseChoice returns a parser that accepts the options alone.
func ParseChoice[T ~string](options ...T) Parser[T] {
	return func(text string) (T, string) {
		var known []string
		for _, option := range options {
			known = append(known, string(option))
		}
		if slices.Contains(known, text) {
			return T(text), ""
		}
		hint := cmp.Or(DidYouMean(text, known), "; write one of "+strings.Join(known, ", "))
		return "", Quote(text) + " is not known" + hint
	}
}

// Quote returns a wrong value for a message: escaped, and cut so that a file pasted into a variable
// does not fill the screen.
func Quote(text string) string {
	const limit = 60
	if len(text) > limit {
		text = text[:limit] + "…"
	}
	return strconv.Quote(text)
}

func hasControl(text string) bool {
	return strings.ContainsFunc(text, func(r rune) bool { return r < 0x20 || r >= 0x7f && r < 0xa0 })
}

// DidYouMean ends a message about a name that is not among the known ones: with the one that was
// probably meant. It is empty if none is close.
func DidYouMean(name string, known []string) string {
	if near := Nearest(name, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
}

// Nearest returns the candidate spelled most like word, or that begins like it; empty if none is
// close.
func Nearest(word string, candidates []string) string {
	best, bestDistance := "", max(2, len(word)/3)+1
	if len(word) > 64 {
		return ""
	}
	for _, candidate := range candidates {
		if len(word) >= 3 && len(candidate) >= 3 && (strings.HasPrefix(word, candidate) || strings.HasPrefix(candidate, word)) {
			return candidate
		}
		if d := editDistance(strings.ToLower(word), strings.ToLower(candidate)); d < bestDistance && d < len(candidate) {
			best, bestDistance = candidate, d
		}
	}
	return best
}

// editDistance counts the insertions, deletions and substitutions that turn a into b (Levenshtein).
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
