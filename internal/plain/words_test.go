package plain

import (
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestCountsAndSpans(t *testing.T) {
	t.Parallel()
	for got, want := range map[string]string{
		Plural(0, "delivery", "deliveries"):  "0 deliveries",
		Plural(1, "delivery", "deliveries"):  "1 delivery",
		Plural(int64(2), "event", "events"):  "2 events",
		Thousands("0"):                       "0",
		Thousands("-123"):                    "-123",
		Thousands("1234"):                    "1,234",
		Thousands("-1234567.891"):            "-1,234,567.891",
		UpTo(99, 100):                        "99",
		UpTo(int64(100), 100):                "100",
		UpTo(101, 100):                       "more than 100",
		Span(-time.Second):                   "0s",
		Span(59400 * time.Millisecond):       "59s",
		Span(59900 * time.Millisecond):       "1m",
		Span(time.Minute):                    "1m",
		Span(115 * time.Second):              "1m55s",
		Span(595 * time.Second):              "9m55s",
		Span(625 * time.Second):              "10m",
		Span(59*time.Minute + time.Second):   "59m",
		Span(59*time.Minute + time.Minute/2): "1h0m",
		Span(125 * time.Minute):              "2h5m",
		Span(24 * time.Hour):                 "1d0h",
		Span(24*time.Hour - time.Second):     "1d0h",
		Span(76*time.Hour + time.Minute):     "3d4h",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestASCII(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{"": true, " a~": true, "a\n": false, "\x7f": false, "é": false, "\x00": false} {
		if IsASCII(text) != want {
			t.Errorf("%q is printable ASCII: %t", text, !want)
		}
	}
}

// A shell gives a program the words as they were, and reads none as another flag.
func TestSecurityShellWords(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		"plain-1_a": "--key plain-1_a", "": "--key ''", "--destination": "--key='--destination'", "-": "--key='-'",
		`it's "a" $(id) \ key`: `--key 'it'\''s "a" $(id) \ key'`, "# key": "--key '# key'", "*": "--key '*'", "a\nb": "--key 'a\nb'", "Ü": "--key 'Ü'",
	} {
		line := ShellFlag("--key", value)
		if line != want {
			t.Errorf("%q is written %s, want %s", value, line, want)
		}
		out, err := exec.CommandContext(t.Context(), "sh", "-c", "printf '%s\\0' "+line).Output()
		words := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
		if joined := strings.Join(words, "="); err != nil || joined != "--key="+value {
			t.Errorf("the shell reads %q as %q: %v", line, words, err)
		}
	}
}
