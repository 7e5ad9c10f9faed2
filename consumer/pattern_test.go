package consumer

import (
	"context"
	"encoding/json"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

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

// FuzzHandleJSON lets any payload come. The handler gets what package json makes of it, and no
// error repeats a value.
func FuzzHandleJSON(f *testing.F) {
	type line struct {
		Article string
		Count   int8
	}
	type invoice struct {
		Number string
		Amount int64
		Lines  []line
		Notes  map[string]string
		Due    *string
	}
	for _, seed := range []string{
		`{"number":"1","amount":2,"lines":[{"article":"a","count":3}],"notes":{"a":"b"},"due":null}`, `{"number":"1"} {}`, `{"a":1,"A":1}`, `null`, ` 1 `,
		`{"lines":[{"count":300}]}`, `{"notes":{"a":"1","a":"2"}}`, `[[[{"x":{"y":[]}}]]]`, `{"\u0061mount":1,"amount":2}`, "{\"number\":\"\xff\"}", `{"K":1}`,
	} {
		f.Add(seed)
	}
	var got invoice
	router := NewRouter()
	HandleJSON(router, "invoice", 0, func(_ context.Context, _ pgx.Tx, _ Event, decoded invoice) error {
		got = decoded
		return nil
	})
	f.Fuzz(func(t *testing.T, payload string) {
		var want invoice
		errJSON := json.Unmarshal([]byte(payload), &want)
		isNull := strings.Trim(payload, " \t\r\n") == "null"
		err := router.Dispatch(t.Context(), nil, Event{Type: "invoice", Payload: []byte(payload)})
		if (err == nil) != (errJSON == nil && !isNull) || err == nil && !reflect.DeepEqual(want, got) {
			t.Errorf("%q: %v; package json: %v", payload, err, errJSON)
		}
		if strings.Contains(payload, "canary") || strings.Contains(payload, "47114711") {
			return // as a name, it may come back
		}
		// A value planted where it does not fit must not come back.
		planted, _ := json.Marshal(map[string]any{"amount": "canary" + payload, "lines": []any{map[string]any{"count": 47114711}}})
		for _, p := range [][]byte{planted, append([]byte(`{"number":"canary"}`), payload...), []byte(`{"count":"canary","n":47114711.` + payload + `}`)} {
			err := router.Dispatch(t.Context(), nil, Event{Type: "invoice", Payload: p})
			if err != nil && (strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "47114711")) {
				t.Errorf("%q: the error repeats a value: %v", p, err)
			}
		}
	})
}
