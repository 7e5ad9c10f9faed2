package output

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// columnGap is how many blanks are between two columns.
const columnGap = 2

// Table prints a list in columns below a header. A header that ends with a tab aligns them to the
// right. Without entries it prints none instead, unless that is empty.
func Table[T any](w io.Writer, none, header string, list []T, row func(T) []any) error {
	if len(list) == 0 && none != "" {
		_, err := fmt.Fprintln(w, none)
		return err
	}
	flags, end := uint(0), ""
	if strings.HasSuffix(header, "\t") {
		flags, end = tabwriter.AlignRight, "\t"
	}
	table := tabwriter.NewWriter(w, 0, 0, columnGap, ' ', flags)
	if header != "" {
		fmt.Fprintln(table, header)
	}
	for _, item := range list {
		var cells []string
		for _, cell := range row(item) {
			cells = append(cells, Cell(cell))
		}
		fmt.Fprintln(table, strings.Join(cells, "\t")+end)
	}
	return table.Flush()
}

// Cell writes a time in UTC, an absent time as "-", and another absent value as nothing.
func Cell(cell any) string {
	switch cell := cell.(type) {
	case time.Time:
		return cell.UTC().Format(time.RFC3339)
	case *time.Time:
		if cell == nil {
			return "-"
		}
		return Cell(*cell)
	case *string:
		return plain.OrBlank(cell)
	case *int64:
		if cell == nil {
			return ""
		}
		return Cell(*cell)
	}
	return fmt.Sprint(cell)
}

// OrEmpty makes JSON show an empty list, not null.
func OrEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// OrDash returns a text, an empty one as "-".
func OrDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

// Age writes seconds as a short duration, never negative: two clocks may disagree.
func Age(seconds float64) string {
	d := time.Duration(max(seconds, 0) * float64(time.Second))
	switch {
	case d == 0:
		return "0s"
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return settings.ShortDuration(d.Round(time.Second))
}

// AfterColon returns ": " and a text, for an empty one nothing.
func AfterColon(text string) string {
	if text == "" {
		return ""
	}
	return ": " + text
}

// MaxAdvice is how much advice is printed at once: an operator who has more to do begins with this.
const MaxAdvice = 6
