package output

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// FuzzWriteJSON: JSON is valid and holds what was to be written, and a terminal that shows it shows
// text.
func FuzzWriteJSON(f *testing.F) {
	for _, seed := range []string{"", "plain", "\x1b[31m\x7f\u009b", "\u202e\u2028\u200b\U000e0041", "\xff\xfe", "\\u202e \"quoted\"", "a\u00a0b\u3000", "\U0010fffd\ufffd"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var b bytes.Buffer
		testkit.Must(t, WriteJSON(&b, map[string]string{text: text}))
		var read map[string]string
		want := strings.ToValidUTF8(text, "") // encoding/json replaces what is not UTF-8, one by one
		if err := json.Unmarshal(b.Bytes(), &read); err != nil {
			t.Fatalf("%v: %q", err, b.String())
		}
		for key, value := range read {
			if key != value || want == text && value != text {
				t.Errorf("%q is read as %q, %q", text, key, value)
			}
		}
		var shown bytes.Buffer
		if _, err := (textWriter{&shown, false}).Write(b.Bytes()); err != nil || shown.String() != b.String() {
			t.Errorf("%v: a terminal is sent %q", err, b.String())
		}
	})
}

// Every string is made printable, wherever it is, and nothing else is touched.
func TestPrintableCopies(t *testing.T) {
	t.Parallel()
	type inner struct {
		Text *string
		Any  any
		At   time.Time
	}
	type outer struct {
		inner
		alert.Alert
		Texts   []string
		ByText  map[string][]inner
		Pair    [2]string
		None    []string
		Nothing map[string]int
		Number  int
	}
	hostile, plain := "a\x1bb\nc", "a\ufffdb c"
	text, now := hostile, time.Now()
	given := outer{
		inner: inner{Text: &text, Any: map[string]any{hostile: []any{hostile, 1}}, At: now}, Alert: alert.Alert{Rule: hostile},
		Texts: []string{hostile}, ByText: map[string][]inner{hostile: {{Any: hostile}}}, Pair: [2]string{hostile, "x"}, Number: 7,
	}
	want := outer{
		inner: inner{Text: &text, Any: map[string]any{hostile: []any{hostile, 1}}, At: now}, Alert: alert.Alert{Rule: plain}, // not exported, not printed
		Texts: []string{plain}, ByText: map[string][]inner{plain: {{Any: plain}}}, Pair: [2]string{plain, "x"}, Number: 7,
	}
	if got := Printable(given); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if given.Texts[0] != hostile || given.Pair[0] != hostile || text != hostile || given.ByText[hostile] == nil {
		t.Error("what was given has changed")
	}
	if got := Printable(&given.Alert); got.Rule != plain || given.Rule != hostile {
		t.Errorf("%+v", got)
	}
}
