package consumer_test

import (
	"os"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

func TestMain(m *testing.M) {
	if dsn := os.Getenv(receiverDSN); dsn != "" {
		receiveAndHang(dsn) // this process is the receiver that TestKilledBetweenCommitAndAnswer kills
		return
	}
	pgtest.RunTests(m)
}
