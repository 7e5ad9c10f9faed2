package elsewhere

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

// Each block of code in the document stands in the receiver of its language, line by line.
func TestDocumentShowsTheReceivers(t *testing.T) {
	t.Parallel()
	const name = "../../docs/receiving-elsewhere.md"
	document, err := os.ReadFile(name)
	pgtest.Must(t, err)
	for _, l := range languages {
		source, err := os.ReadFile(filepath.Join(l.name, l.file))
		pgtest.Must(t, err)
		blocks := strings.Split(string(document), "```"+l.fence+"\n")[1:]
		if len(blocks) == 0 {
			t.Errorf("%s shows no %s", name, l.name)
		}
		for _, block := range blocks {
			block, _, _ = strings.Cut(block, "```")
			if !strings.Contains(string(source), block) {
				t.Errorf("%s: %s has no\n%s", name, l.file, block)
			}
		}
	}
}
