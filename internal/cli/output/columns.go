package output

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"
)

// columns returns how wide the terminal behind a writer is; 0: there is none, or it does not say.
// It is asked each time, because windows change.
func columns(w io.Writer) int {
	f, isFile := Raw(w).(*os.File)
	if !isFile || !IsTerminal(f) {
		return 0
	}
	return columnsOf(f)
}

// Prose prints a text as a line. A terminal gets it broken between words, with indent before the
// further lines: it breaks within words. Commands are not prose, because a broken one cannot be
// copied.
func Prose(w io.Writer, indent, text string) {
	PaintedProse(w, "", indent, "", text)
}

// PaintedProse is [Prose] whose beginning is painted.
func PaintedProse(w io.Writer, color, indent, beginning, text string) {
	whole := wrap(beginning+text, indent, columns(w))
	if color != "" {
		Paint(w, color)
		_, _ = io.WriteString(w, whole[:len(beginning)])
		Paint(w, NoColor)
		whole = whole[len(beginning):]
	}
	fmt.Fprintln(w, whole)
}

// wrap breaks a text at blanks so that no line is wider than width, if its words allow that. 0: it
// stays one line.
func wrap(text, indent string, width int) string {
	if width == 0 || utf8.RuneCountInString(text) <= width {
		return text
	}
	var b strings.Builder
	used := 0
	for i, word := range strings.SplitAfter(text, " ") {
		n := utf8.RuneCountInString(strings.TrimSuffix(word, " "))
		if i > 0 && used+n > width {
			b.WriteString("\n" + indent)
			used = utf8.RuneCountInString(indent)
		}
		b.WriteString(word)
		used += utf8.RuneCountInString(word)
	}
	return strings.ReplaceAll(b.String(), " \n", "\n")
}

// List prints a [Table] of many rows, of which a command shows each whole. On a terminal each row
// is one line, cut at its width, and a wide column is narrowed before: a long key would push all
// that is behind it off the screen.
func List[T any](w io.Writer, none, header string, list []T, row func(T) []any) error {
	width := columns(w)
	var rows [][]any
	for _, item := range list {
		rows = append(rows, row(item))
	}
	narrow(header, rows, width)
	var b strings.Builder
	if err := Table(&b, none, header, rows, func(cells []any) []any { return cells }); err != nil {
		return err
	}
	_, err := io.WriteString(w, cut(b.String(), width))
	return err
}

// narrow shortens the cells of the widest columns until the rows fit into a width, but no column
// below nearly half of that: a timestamp or a UUID stays whole. 0: they stay as they are.
func narrow(header string, rows [][]any, width int) {
	if width == 0 || len(rows) == 0 {
		return
	}
	widths := make([]int, len(rows[0]))
	for i, name := range strings.Split(header, "\t")[:min(strings.Count(header, "\t")+1, len(widths))] {
		widths[i] = utf8.RuneCountInString(name)
	}
	total := -columnGap
	for i := range widths {
		for _, cells := range rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(Cell(cells[i])))
		}
		total += widths[i] + columnGap
	}
	least := max(width/2-4, 1)
	for ; total > width && slices.Max(widths) > least; total-- {
		widths[slices.Index(widths, slices.Max(widths))]--
	}
	for _, cells := range rows {
		for i, cell := range cells {
			cells[i] = clip(Cell(cell), widths[i])
		}
	}
}

func clip(text string, width int) string {
	if utf8.RuneCountInString(text) <= width {
		return text
	}
	return string([]rune(text)[:width-1]) + "…"
}

// cut shortens the lines of a table to a width, so that each row stays a line. 0: they stay as they
// are.
func cut(table string, width int) string {
	if width == 0 {
		return table
	}
	lines := strings.Split(table, "\n")
	for i, line := range lines {
		lines[i] = clip(strings.TrimRight(line, " "), width)
	}
	return strings.Join(lines, "\n")
}
