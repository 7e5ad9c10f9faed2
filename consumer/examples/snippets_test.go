package examples

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What the guide shows is part of a program that works: each of its blocks of Go stands in an
// example or its test, line by line.
func TestGuideShowsTheExamples(t *testing.T) {
	t.Parallel()
	programs, err := filepath.Glob("*/main*.go")
	if err != nil || len(programs) == 0 {
		t.Fatalf("%d programs: %v", len(programs), err)
	}
	var all strings.Builder
	for _, name := range programs {
		text, err := os.ReadFile(name)
		testkit.Must(t, err)
		all.Write(text)
	}
	const name = "../../docs/receiving.md"
	guide, err := os.ReadFile(name)
	testkit.Must(t, err)
	blocks := strings.Split(string(guide), "```go\n")[1:]
	if len(blocks) == 0 {
		t.Errorf("%s shows no Go", name)
	}
	for _, block := range blocks {
		block, _, _ = strings.Cut(block, "```")
		if !strings.Contains(all.String(), block) {
			t.Errorf("%s: no example has\n%s", name, block)
		}
	}
}
