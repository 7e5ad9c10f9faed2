package consumer_test

import (
	"os"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(roleName); name != "" {
		play(name) // this process is one that a test has started, and may kill
		return
	}
	pgtest.RunTests(m)
}
