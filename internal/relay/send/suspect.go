package send

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// awaitPost waits until a delivery may be sent: a suspect until no other POST is under way, any
// other until no suspect is being sent alone. The caller calls leave after the POST. Instead of
// leave it returns a result if the delivery must not be sent now.
func (s *Senders) awaitPost(d *lane.Delivery) (leave func(), instead *policy.Result) {
	switch {
	case d.Rescues >= capacity.CrashLoop:
		return nil, &policy.Result{Reason: policy.ReasonCrashLoop, Message: fmt.Sprintf(
			"%d times in a row a relay died while it sent this delivery with nothing else beside it", d.Rescues-capacity.AloneFrom)}
	case d.Lost:
		wait := capacity.SuspectWait(d.Rescues)
		return nil, s.postpone(d, wait+rand.N(wait)) // at random, so that those lost together part
	case d.Rescues < capacity.AloneFrom || s.alone.HasEnough():
		return s.alone.Beside(), nil
	}
	if wait := s.alone.Reserve(time.Now()); wait > 0 {
		return nil, s.postpone(d, rand.N(2*wait+time.Second)) // not all at the same time
	}
	end := s.alone.Alone()
	d.Alone = true
	return func() { end(time.Now()) }, nil
}

// postpone makes a claimed delivery due again after the given time. If that fails, it is due at
// once.
func (s *Senders) postpone(d *lane.Delivery, wait time.Duration) *policy.Result {
	if err := s.postponeClaimed(s.Settling, d, wait); err != nil {
		s.Failed("postpone suspect", err)
	} else {
		s.Retry(time.Now(), wait)
	}
	return &policy.Result{Reason: policy.ReasonSuspect}
}

// countFirst returns what a suspect that is sent alone does before its request begins: it counts
// that request, since nothing can be written afterwards if the relay dies of it. nil: there is
// nothing to do.
func (s *Senders) countFirst(d *lane.Delivery, to *post.Endpoint) func() *policy.Result {
	if !d.Alone {
		return nil
	}
	return func() *policy.Result {
		if err := s.countAlone(s.Settling, d, 1); err != nil {
			s.Failed("count suspect", err)
			return &policy.Result{Reason: policy.ReasonDatabase}
		}
		late := tooLate(d, to)
		if late != nil { // there is no request
			if err := s.countAlone(s.Settling, d, -1); err != nil {
				s.Failed("count suspect", err)
			}
		}
		return late
	}
}
