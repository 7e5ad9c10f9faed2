package relay

import (
	"encoding/json"
	"html"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"
)

func FuzzParseRetryAfter(f *testing.F) {
	for _, seed := range []string{
		"", "0", "-5", "120", "1e9", "1000000000000000000000000000000", "Sun, 01 Mar 2026 12:00:30 GMT",
		"Sunday, 01-Mar-26 12:00:30 GMT", "Sun Mar  1 12:00:30 2026", "Fri, 31 Dec 9999 23:59:59 GMT", "\x00", "٣",
	} {
		f.Add(seed)
	}
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, value string) {
		if got := parseRetryAfter(http.Header{"Retry-After": {value}}, now); got < 0 || got > maxDelay {
			t.Errorf("%q: %s", value, got)
		}
	})
}

// A secret that the receiver repeats within any text is found, whatever it consists of and however it is escaped.
func FuzzMask(f *testing.F) {
	for _, seed := range []string{"Bearer abc+def/ghi==", `pass"word\n`, "%41%2541", "a<b>c&amp;d", "\xff\x00secret", "----", "\\u0041\\"} {
		f.Add(seed, "at ", " here")
	}
	f.Fuzz(func(t *testing.T, secret, before, after string) {
		m := &mask{}
		m.addHeader(secret)
		if l := newLayer(secret); len(l.bare().text) < maskedPrefix {
			return
		}
		escaped, _ := json.Marshal(strings.ToValidUTF8(secret, "?"))
		for _, form := range []string{secret, html.EscapeString(secret), url.QueryEscape(secret), string(escaped)} {
			text := m.hide(before+" "+form+" "+after, true)
			if form == secret && strings.Contains(text, secret) && !strings.Contains(before+after+masked, secret) {
				t.Errorf("%q is left in %q", secret, text)
			}
			if !strings.Contains(text, masked) && strings.ToValidUTF8(secret, "?") == secret {
				t.Errorf("%q is not found in %q", secret, text)
			}
		}
	})
}
