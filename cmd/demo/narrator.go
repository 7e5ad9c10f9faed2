package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mattn/go-isatty"
)

// narrator tells what happens, a line each, with the time since it was made. It is safe for concurrent use.
type narrator struct {
	begun time.Time
	color bool

	mu sync.Mutex // guards w
	w  io.Writer
}

func newNarrator(w io.Writer) *narrator {
	f, ok := w.(*os.File)
	color := ok && isatty.IsTerminal(f.Fd()) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	return &narrator{begun: time.Now(), color: color, w: w}
}

// say tells of something that has just happened.
func (n *narrator) say(format string, args ...any) {
	n.print(n.dim(fmt.Sprintf("%6.1fs  ", time.Since(n.begun).Seconds())) + fmt.Sprintf(format, args...))
}

// print writes a line as it is.
func (n *narrator) print(line string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, _ = fmt.Fprintln(n.w, line) // who does not listen misses it
}

func (n *narrator) dim(text string) string   { return n.paint("2", text) }
func (n *narrator) bold(text string) string  { return n.paint("1", text) }
func (n *narrator) green(text string) string { return n.paint("32", text) }
func (n *narrator) red(text string) string   { return n.paint("31;1", text) }

func (n *narrator) paint(code, text string) string {
	if !n.color {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// count writes a number for people: 12,345.
func count(n int) string {
	digits := strconv.Itoa(n)
	var b strings.Builder
	for i, d := range digits {
		if left := len(digits) - i; i > 0 && left%3 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(d)
	}
	return b.String()
}

// short writes a duration for people: 7 ms, 1.3 s.
func short(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}
