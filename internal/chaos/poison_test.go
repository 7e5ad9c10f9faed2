package chaos

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// One event in a thousand is refused for good, under load, while relays are killed: it fails, and
// no other event notices.
func TestOneInAThousandIsPoison(t *testing.T) {
	testsize.Long(t)
	const events, poison = 20_000, 20
	s := newStage(t, 1, 0)
	for _, name := range []string{"relay-1", "relay-2"} {
		s.openRelay(name, "OUTBOX_DEFAULTS_BATCH_MAX=1") // the wire refuses events, not parts of batches
	}
	s.making = "relay killed"
	ended := s.produceMeanwhile(1000, events)
	for n := range poison {
		_, err := s.outbox.Exec(s.Ctx, insertEvent, fmt.Sprintf("%s-%d", unfit, n), fmt.Sprintf("poison-%d", n), 0)
		s.must(err)
		<-time.After(s.between(500*time.Millisecond, time.Second))
		s.on(s.relays[n%2].Unit, history.Undoes, (*process.Process).Kill)
		s.reborn(s.relays[n%2].Unit)
	}
	ended()
	s.drained()
	s.repeats = poison * 30 // what a relay had in hand or had just settled
	t.Logf("%d poisoned, %d relays killed: %s", poison, poison, s.judge())
	s.until("every poisoned event to fail", func(ctx context.Context) (bool, error) {
		return process.One[bool](ctx, s.outbox, `SELECT count(*) = $1 FROM outbox_delivery WHERE status = 'failed' AND last_http_status = 422`, poison)
	})
	failed, err := process.One[int](s.Ctx, s.outbox, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed'`)
	if s.must(err); failed != poison {
		t.Errorf("%d failed, %d of them are poison", failed, poison)
	}
}
