package settings

import (
	"math/rand/v2"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// count returns the nodes of a tree, without what aliases stand for.
func count(n *yaml.Node) int {
	total := 1
	for _, child := range n.Content {
		total += count(child)
	}
	return total
}

// A file is refused before its tree is built if that would be too large: no text may have more
// nodes than are expected of it.
func TestNoFileHasMoreNodesThanExpected(t *testing.T) {
	t.Parallel()
	parts := []string{"a", `"b"`, "'", ":", ": ", ",", ", ", "{", "}", "[", "]", "- ", "-\n", "\n", " ", "  ", "? ", "&x ", "*x ", "!t ", "|\n", "#", "{a,b}", "[,", "\"\":/", "---\n", "\t"}
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same texts in each run
	parsed := 0
	for range 300_000 {
		var text strings.Builder
		for range 1 + random.IntN(12) {
			text.WriteString(parts[random.IntN(len(parts))])
		}
		var document yaml.Node
		if yaml.Unmarshal([]byte(text.String()), &document) != nil {
			continue
		}
		parsed++
		if got, most := count(&document), mayHaveNodes([]byte(text.String())); got > most {
			t.Fatalf("%q has %d nodes, more than %d", text.String(), got, most)
		}
	}
	if parsed < 1000 {
		t.Errorf("only %d texts were parsed", parsed)
	}
}
