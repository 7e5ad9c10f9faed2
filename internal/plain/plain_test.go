package plain

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"
)

// hostile are texts that a terminal, a log or a reader would obey or not see, each beside what may
// be shown of it.
var hostile = []struct{ give, want string }{
	{"", ""},
	{"plain, ünïcödé, 日本, 🚀", "plain, ünïcödé, 日本, 🚀"},
	{"a\r\nb\tc\vd\fe", "a  b c d e"},
	{"nul\x00", "nul\ufffd"},
	{"\x1b[31mred\x1b[0m", "\ufffd[31mred\ufffd[0m"},
	{"\x1b]0;title\x07", "\ufffd]0;title\ufffd"},
	{"del\x7f csi\u009b31m nel\u0085", "del\ufffd csi\ufffd31m nel "},
	{"gpj.\u202eexe", "gpj.\ufffdexe"},
	{"\u2066isolate\u2069", "\ufffdisolate\ufffd"},
	{"line\u2028paragraph\u2029", "line paragraph "},
	{"marks \u200e\u200f\u061c", "marks \ufffd\ufffd\ufffd"},
	{"zero\u200bwidth\u200c\u200d\u2060\ufeff", "zero\ufffdwidth\ufffd\ufffd\ufffd\ufffd"},
	{"soft\u00adhyphen \u180e\u034f\u115f\u3164\uffa0", "soft\ufffdhyphen \ufffd\ufffd\ufffd\ufffd\ufffd"},
	{"tags\U000e0001\U000e0041\U000e007f", "tags\ufffd\ufffd\ufffd"},
	{"selectors\ufe0f\U000e0100", "selectors\ufffd\ufffd"},
	{"private \ue000\U000f0000\U0010fffd unassigned \u0378 \U000e0fff", "private \ufffd\ufffd\ufffd unassigned \ufffd \ufffd"},
	{"blanks\u00a0\u3000\u2003\u2800.", "blanks    ."},
	{"\xff\xfe", "\ufffd"},
	{"surrogate \xed\xa0\x80", "surrogate \ufffd"},
	{"cut \xe2\x82", "cut \ufffd"},
}

func TestSecurityPrintable(t *testing.T) {
	t.Parallel()
	for _, c := range hostile {
		if got := Line(c.give); got != c.want {
			t.Errorf("%+q: %+q, want %+q", c.give, got, c.want)
		}
	}
	for r := rune(0); r <= unicode.MaxRune; r++ {
		if got := Line("a" + string(r) + "b"); unicode.In(r, obeyed...) && strings.ContainsRune(got, r) {
			t.Errorf("%U passes", r)
		}
	}
	for _, c := range []struct{ give, want string }{
		{strings.Repeat("x", MaxBytes), strings.Repeat("x", MaxBytes)},
		{strings.Repeat("x", MaxBytes+1), strings.Repeat("x", MaxBytes-3) + "…"},
		{strings.Repeat("x", MaxBytes-4) + "€€", strings.Repeat("x", MaxBytes-4) + "…"},
	} {
		if got := Clip(c.give); got != c.want {
			t.Errorf("%.60q: %.60q, want %.60q", c.give, got, c.want)
		}
	}
}

// obeyed are the categories of what no text may hold.
var obeyed = []*unicode.RangeTable{unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Co, unicode.Cs}

func TestClippedTextIsStorableAndPrintable(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		wantPrintable(t, string(rapid.SliceOfN(rapid.Byte(), 0, 3*MaxBytes).Draw(t, "bytes")))
	})
}

// FuzzPrintable: whatever a text holds, what is stored and shown of it is one line that nothing
// obeys.
func FuzzPrintable(f *testing.F) {
	for _, c := range hostile {
		f.Add(c.give)
	}
	f.Fuzz(func(t *testing.T, text string) { wantPrintable(t, text) })
}

// wantPrintable checks what PostgreSQL, terminals and logs need of a text.
func wantPrintable(t interface{ Fatalf(string, ...any) }, text string) {
	shown := Line(text)
	got := Clip(text)
	if len(got) > MaxBytes || !utf8.ValidString(shown) || !utf8.ValidString(got) {
		t.Fatalf("clip(%q) has %d bytes, valid UTF-8 %t", text, len(got), utf8.ValidString(got))
	}
	if i := strings.IndexFunc(shown+got, func(r rune) bool { return unicode.In(r, obeyed...) || unicode.IsSpace(r) && r != ' ' }); i >= 0 {
		t.Fatalf("%+q is shown as %+q", text, shown)
	}
	if Line(shown) != shown || Clip(got) != got {
		t.Fatalf("%q changes when it is made printable again", text)
	}
}

func TestSome(t *testing.T) {
	names := []string{"a", "b", "c"}
	for shown, want := range map[int]string{1: "a and 2 more", 2: "a, b and 1 more", 3: "a, b, c", 9: "a, b, c"} {
		if got := Some(names, shown); got != want {
			t.Errorf("Some(%d) is %q, want %q", shown, got, want)
		}
	}
}
