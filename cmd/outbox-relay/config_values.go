package main

import (
	"fmt"
	"math"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A kind says how the texts of a setting become its value.
type kind struct {
	list    bool   // several texts; otherwise exactly one
	example string // of the whole value, in YAML
	minimum int    // of texts in a list
	// read returns the value, and what is wrong with each text (empty: nothing).
	read func(texts []string) (value any, problems []string)
}

func one[T any](example string, parse func(string) (T, string)) kind {
	return kind{example: example, read: func(texts []string) (any, []string) {
		value, problem := parse(texts[0])
		return value, []string{problem}
	}}
}

func many[T any](example string, parse func(string) (T, string)) kind {
	return kind{list: true, example: example, read: func(texts []string) (any, []string) {
		values, problems := make([]T, len(texts)), make([]string, len(texts))
		for i, text := range texts {
			values[i], problems[i] = parse(text)
		}
		return values, problems
	}}
}

func (k kind) notEmpty() kind {
	k.minimum = 1
	return k
}

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

func parseDuration(text string) (time.Duration, string) {
	d, err := time.ParseDuration(text)
	compact := strings.ToLower(strings.Join(strings.Fields(text), ""))
	_, compactErr := time.ParseDuration(compact)
	switch {
	case text == "":
		return 0, `is empty; write a duration such as "5s"`
	case bareNumber.MatchString(text):
		return 0, fmt.Sprintf(`%s has no unit; write "%ss"`, quote(text), strings.TrimPrefix(text, "-"))
	case err == nil && d <= 0:
		return 0, fmt.Sprintf(`%s is not more than zero; write a duration such as "5s"`, quote(text))
	case err == nil:
		return d, ""
	case longUnits.MatchString(text):
		return 0, fmt.Sprintf(`%s uses a unit longer than hours; write "%s"`, quote(text), inHours(longUnits.FindStringSubmatch(text)))
	case knownDuration.MatchString(text):
		return 0, quote(text) + " is too long; the longest duration is 2562047h"
	case compactErr == nil && compact != text:
		return 0, fmt.Sprintf("%s is not a duration; write %q", quote(text), compact)
	}
	return 0, quote(text) + ` is not a duration; write one such as "5s", "15m" or "24h"`
}

// inHours turns the parts of a text such as "3d" into hours.
func inHours(parts []string) string {
	n, _ := strconv.Atoi(parts[1])
	if parts[2] == "w" {
		n *= 7
	}
	return strconv.Itoa(n*24) + "h"
}

func parseNumber(text string) (int, string) {
	n, err := strconv.ParseInt(text, 10, 32)
	switch {
	case text == "":
		return 0, "is empty; write a whole number"
	case err != nil:
		return 0, quote(text) + " is not a whole number"
	}
	return int(n), ""
}

func parseCount(text string) (int, string) {
	n, problem := parseNumber(text)
	if problem == "" && n < 1 {
		problem = quote(text) + " is too small; write 1 or more"
	}
	return n, problem
}

func parseShare(text string) (float64, string) {
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return 0, quote(text) + " is not a number; write one from 0 to 1"
	}
	return f, ""
}

func parseBool(text string) (bool, string) {
	if text == "true" || text == "false" {
		return text == "true", ""
	}
	return false, quote(text) + " is neither true nor false"
}

func parseText(text string) (string, string) {
	switch {
	case text == "":
		return "", "is empty"
	case hasControl(text):
		return "", "contains a control character, such as a line break"
	}
	return text, ""
}

// parseSchema takes an empty text, too: the first schema of the search_path.
func parseSchema(text string) (string, string) {
	if text == "" {
		return "", ""
	}
	text, problem := parseText(text)
	switch {
	case problem != "":
	case len(text) > 63:
		problem = "is longer than 63 bytes, which PostgreSQL would cut off"
	case strings.HasPrefix(text, "pg_") || text == "information_schema":
		problem = quote(text) + " belongs to PostgreSQL itself"
	}
	return text, problem
}

func parseSecretText(text string) (secret, string) {
	plain, problem := parseText(text)
	return secret(plain), problem
}

// parseOptionalSecretText takes an empty text, too: none.
func parseOptionalSecretText(text string) (secret, string) {
	if text == "" {
		return "", ""
	}
	return parseSecretText(text)
}

func parseSigningSecret(text string) (webhook.Secret, string) {
	s, err := webhook.ParseSecret(text)
	if err != nil {
		return s, err.Error()
	}
	return s, ""
}

// parseChannelURL never repeats the URL: whoever knows it can post to the channel.
func parseChannelURL(text string) (secret, string) {
	if _, problem := parseText(text); problem != "" {
		return "", problem
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return "", "is not a URL"
	case u.Scheme != "https" && u.Scheme != "http":
		return "", "is not a URL that starts with https:// or http://"
	case u.Hostname() == "":
		return "", "has no host"
	}
	return secret(text), ""
}

func parseChoice(options ...string) func(string) (string, string) {
	return func(text string) (string, string) {
		if slices.Contains(options, text) {
			return text, ""
		}
		if near := nearest(text, options); near != "" {
			return "", fmt.Sprintf("%s is not known; did you mean %q?", quote(text), near)
		}
		return "", fmt.Sprintf("%s is not known; write one of %s", quote(text), strings.Join(options, ", "))
	}
}

// quote shows a wrong value: escaped, and cut so that a file pasted into a variable does not fill the screen.
func quote(text string) string {
	const limit = 60
	if len(text) > limit {
		text = text[:limit] + "…"
	}
	return strconv.Quote(text)
}

func hasControl(text string) bool {
	return strings.ContainsFunc(text, func(r rune) bool { return r < 0x20 || r >= 0x7f && r < 0xa0 })
}

// nearest returns the candidate spelled most like word, or that begins like it; empty if none is close.
func nearest(word string, candidates []string) string {
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
