package elsewhere

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

// drilled lets the checks of the command drill try the receiver.
func drilled(t *testing.T, r *receiver) {
	receivertest.Drill(t, r.url, r.pool, otherSecret, oldSecret, secret)
}
