package send

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }
