package drill

import (
	"encoding/xml"
	"fmt"
	"os"

	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/drill"
)

// A testSuite is a report as JUnit has it.
type testSuite struct {
	XMLName  xml.Name   `xml:"testsuite"`
	Name     string     `xml:"name,attr"`
	Tests    int        `xml:"tests,attr"`
	Failures int        `xml:"failures,attr"`
	Skipped  int        `xml:"skipped,attr"`
	Seconds  float64    `xml:"time,attr"`
	Cases    []testCase `xml:"testcase"`
}

type testCase struct {
	Class   string   `xml:"classname,attr"`
	Name    string   `xml:"name,attr"`
	Seconds float64  `xml:"time,attr"`
	Failure *message `xml:"failure"`
	Skipped *message `xml:"skipped"`
	Output  string   `xml:"system-out,omitempty"` // of a warning
}

type message struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// writeJUnit writes a report. Warnings are failures where they count as such.
func writeJUnit(name string, r drill.Report, strict bool) error {
	suite := testSuite{Name: "outbox-relay drill", Tests: len(r.Checks), Skipped: r.Count(drill.Skipped), Seconds: r.Seconds}
	for _, c := range output.Printable(r).Checks { // XML has no control characters
		one := testCase{Class: "drill", Name: c.Name, Seconds: c.Seconds}
		text := fmt.Sprintf("sent: %s\nexpected: %s\ndo: %s\nsee: %s", c.Sends, c.Expects, c.Remedy, c.Link)
		switch {
		case c.Outcome == drill.Failed || strict && c.Outcome == drill.Warned:
			suite.Failures++
			one.Failure = &message{c.Found, text}
		case c.Outcome == drill.Warned:
			one.Output = "warning: " + c.Found + "\n" + text
		case c.Outcome == drill.Skipped:
			one.Skipped = &message{Message: c.Found}
		}
		suite.Cases = append(suite.Cases, one)
	}
	text, err := xml.MarshalIndent(suite, "", "  ")
	if err == nil {
		err = os.WriteFile(name, append([]byte(xml.Header), append(text, '\n')...), 0o600)
	}
	if err != nil {
		return fmt.Errorf("write JUnit's report: %w", err)
	}
	return nil
}
