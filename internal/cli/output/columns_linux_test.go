package output

import (
	"bufio"
	"os"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// openTerminal returns both ends of a terminal of a width.
func openTerminal(t *testing.T, width uint16) (screen, program *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("there is no terminal: %v", err)
	}
	t.Cleanup(func() { _ = screen.Close() })
	fd := int(screen.Fd())
	testkit.Must(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	testkit.Must(t, err)
	program, err = os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	testkit.Must(t, err)
	t.Cleanup(func() { _ = program.Close() })
	testkit.Must(t, unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: width}))
	return screen, program
}

// On a terminal of 80 columns a row is one line, and prose breaks between words; elsewhere both are
// whole.
func TestFitsTheTerminal(t *testing.T) {
	t.Parallel()
	screen, program := openTerminal(t, 80)
	w := NewTextWriter(program, true)
	long := strings.Repeat("long ", 40) + "end"
	row := func(s string) []any { return []any{s, long} }
	testkit.Must(t, List(w, "", "KEY\tERROR", []string{"key-1"}, row))
	Prose(w, "  ", long)
	lines := bufio.NewScanner(screen)
	var all []string
	for lines.Scan() {
		line := strings.TrimRight(lines.Text(), "\r")
		if all = append(all, line); utf8.RuneCountInString(line) > 80 || strings.HasSuffix(line, " ") {
			t.Errorf("%q", line)
		}
		if strings.HasSuffix(line, "end") {
			break
		}
	}
	if len(all) != 5 || !strings.HasPrefix(all[1], "key-1  long") || !strings.HasSuffix(all[1], "…") || !strings.HasPrefix(all[3], "  long") {
		t.Errorf("%q", all)
	}

	key := strings.Repeat("k", 255)
	cells := func(s string) []any { return []any{4711, key, "failed", s} }
	for _, header := range []string{"EVENT\tKEY\tSTATUS\tERROR", ""} { // without a header, as a preview
		testkit.Must(t, List(w, "", header, []string{"503"}, cells))
		line := ""
		for !strings.HasPrefix(line, "4711") && lines.Scan() {
			line = lines.Text()
		}
		if utf8.RuneCountInString(line) > 80 || !strings.Contains(line, strings.Repeat("k", 36)) || !strings.Contains(line, "…  failed  503") {
			t.Errorf("%q", line)
		}
	}

	var b strings.Builder
	testkit.Must(t, List(NewTextWriter(&b, false), "", "KEY\tERROR", []string{"key-1"}, row))
	Prose(&b, "  ", long)
	if want := "KEY    ERROR\nkey-1  " + long + "\n" + long + "\n"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}
