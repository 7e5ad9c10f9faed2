package inbox_test

import (
	"flag"
	"strconv"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	runMoreAtOnce()
	receivertest.RunTests(m, map[string]func(p *receivertest.Player){
		"work-die": workAndDie,
		"record":   recordOnly,
		"work":     recordAndWork,
	})
}

// runMoreAtOnce doubles -parallel, unless it is 1. Nearly all tests of this package wait: for locks that time out, and for the
// looks at workers that have died.
func runMoreAtOnce() {
	parallel := flag.Lookup("test.parallel").Value
	if n, err := strconv.Atoi(parallel.String()); err == nil && n > 1 {
		_ = parallel.Set(strconv.Itoa(2 * n))
	}
}
