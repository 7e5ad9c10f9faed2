package memory_test

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

func TestMain(m *testing.M) {
	receivertest.RunTests(m, map[string]func(p *receivertest.Player){"prune-die": pruneAndDie})
}
