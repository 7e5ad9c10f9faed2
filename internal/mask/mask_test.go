package mask

import (
	"encoding/json"
	"html"
	"net/url"
	"strings"
	"testing"
)

// A secret that the receiver repeats within any text is found, whatever it consists of and however
// it is escaped.
func FuzzMask(f *testing.F) {
	for _, seed := range []string{"Bearer abc+def/ghi==", `pass"word\n`, "%41%2541", "a<b>c&amp;d", "\xff\x00secret", "----", "\\u0041\\"} {
		f.Add(seed, "at ", " here")
	}
	f.Fuzz(func(t *testing.T, secret, before, after string) {
		m := &Mask{}
		m.AddHeader(secret)
		if l := newLayer(secret); len(l.bare().text) < maskedPrefix {
			return
		}
		escaped, _ := json.Marshal(strings.ToValidUTF8(secret, "?"))
		for _, form := range []string{secret, html.EscapeString(secret), url.QueryEscape(secret), string(escaped)} {
			text := m.Hide(before+" "+form+" "+after, true)
			if form == secret && strings.Contains(text, secret) && !strings.Contains(before+after+masked, secret) {
				t.Errorf("%q is left in %q", secret, text)
			}
			if !strings.Contains(text, masked) && strings.ToValidUTF8(secret, "?") == secret {
				t.Errorf("%q is not found in %q", secret, text)
			}
		}
	})
}
