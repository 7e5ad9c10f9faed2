package drill

import (
	"encoding/xml"
	"fmt"
	"os"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/drill"
)

// writeJUnit writes a report as JUnit has it.
func writeJUnit(name string, r drill.Report, failures int, strict bool) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s<testsuite name=\"outbox-relay drill\" tests=\"%d\" failures=\"%d\" skipped=\"%d\" time=\"%.3f\">\n", xml.Header, len(r.Checks), failures, r.Count(drill.Skipped), r.Seconds)
	for _, c := range output.Printable(r).Checks { // XML has no control characters
		found, text := escape(c.Found), escape(fmt.Sprintf("sent: %s\nexpected: %s\ndo: %s\nsee: %s", c.Sends, c.Expects, c.Remedy, c.Link))
		fmt.Fprintf(&b, "  <testcase classname=\"drill\" name=\"%s\" time=\"%.3f\">", c.Name, c.Seconds)
		switch {
		case c.Outcome == drill.Failed || strict && c.Outcome == drill.Warned:
			fmt.Fprintf(&b, "<failure message=\"%s\">%s</failure>", found, text)
		case c.Outcome == drill.Warned:
			fmt.Fprintf(&b, "<system-out>warning: %s\n%s</system-out>", found, text)
		case c.Outcome == drill.Skipped:
			fmt.Fprintf(&b, "<skipped message=\"%s\"></skipped>", found)
		}
		b.WriteString("</testcase>\n")
	}
	if err := os.WriteFile(name, []byte(b.String()+"</testsuite>\n"), 0o600); err != nil {
		return fmt.Errorf("write JUnit's report: %w", err)
	}
	return nil
}

func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a builder takes everything
	return b.String()
}
