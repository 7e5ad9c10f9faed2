package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// number writes a figure with thousands set apart.
func number(value float64, decimals int) string {
	return plain.Thousands(strconv.FormatFloat(value, 'f', decimals, 64))
}

// spread writes the median of the rounds, and their least and greatest if there are several.
func spread(values []float64, decimals int) string {
	if len(values) == 0 {
		return ""
	}
	middle := number(median(values), decimals)
	if len(values) == 1 {
		return middle
	}
	least, greatest := number(slices.Min(values), decimals), number(slices.Max(values), decimals)
	if least == greatest {
		return middle
	}
	return fmt.Sprintf("%s (%s–%s)", middle, least, greatest)
}

// markdown writes the table of a workload, with a column for whatever was measured at all.
func markdown(w workload, all results, o options) string {
	type column struct {
		heading string
		cell    func(at place) string
	}
	var columns []column
	add := func(heading string, cell func(at place) string) {
		for at := range all {
			if cell(at) != "" {
				columns = append(columns, column{heading, cell})
				return
			}
		}
	}
	for _, m := range w.metrics {
		add(m.heading, func(at place) string { return spread(all.values(at, m.key), m.decimals) })
	}
	for _, by := range w.ratios {
		add(by.heading, func(at place) string { return spread(all.ratios(at, by), 2) })
	}
	var text strings.Builder
	fmt.Fprintf(&text, "%s Each figure is the median of %s (least–greatest).\n\n", w.about, plain.Plural(o.rounds, "round", "rounds"))
	text.WriteString("| | |")
	for _, c := range columns {
		text.WriteString(" " + c.heading + " |")
	}
	text.WriteString("\n|---|---|" + strings.Repeat("--:|", len(columns)) + "\n")
	for _, c := range w.cases {
		for i, e := range c.entrants {
			name := c.name
			if i > 0 {
				name = ""
			}
			fmt.Fprintf(&text, "| %s | %s |", name, e.system)
			for _, column := range columns {
				text.WriteString(" " + column.cell(place{c.name, e.system}) + " |")
			}
			text.WriteString("\n")
		}
	}
	return text.String()
}

// hasPlace reports an error unless performance.md has the markers of a workload.
func hasPlace(docs string, w workload) error {
	_, err := page(docs, w, "")
	return err
}

// page returns performance.md with a text between the markers of a workload.
func page(docs string, w workload, text string) (changed string, err error) {
	path := filepath.Join(docs, "performance.md")
	current, err := os.ReadFile(path)
	if err == nil {
		changed, err = between(string(current), w.name, text)
	}
	if err != nil {
		return "", fmt.Errorf("publish %s in %s: %w", w.name, path, err)
	}
	return changed, nil
}

// publish puts a table between the markers of its workload in performance.md.
func publish(docs string, w workload, machine, table string) error {
	changed, err := page(docs, w, machine+" "+table)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(docs, "performance.md"), []byte(changed), 0o644)
}

// between replaces what stands between the two markers of a name.
func between(page, name, text string) (string, error) {
	begin, end := "<!-- bench "+name+" -->\n", "<!-- end "+name+" -->"
	before, rest, found := strings.Cut(page, begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		return "", fmt.Errorf("there is no %q … %q", strings.TrimSpace(begin), end)
	}
	return before + begin + text + end + after, nil
}
