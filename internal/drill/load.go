package drill

import (
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// unhandled sends an event for which there is no handler.
func unhandled(change func(*trial, event) event) func(*trial) finding {
	return func(t *trial) finding {
		a := t.send(change(t, t.event()))
		if a.accepted() || a.final() {
			return finding{}
		}
		return fault("it %s: a relay sends the event for hours, and holds up what comes behind it", a)
	}
}

func reordered(t *trial) finding {
	older, newer, order := t.event(), t.event(), t.event().key
	at := func(e event) event {
		return e.covering(func(h http.Header) {
			h[webhook.OrderingKey], h[webhook.Sequence] = []string{order}, []string{strconv.FormatInt(e.id, 10)}
		})
	}
	if a := t.send(at(newer)); !a.accepted() {
		return fault("it %s to a valid event with an ordering key", a)
	}
	if a := t.send(at(older)); !a.accepted() {
		return fault("it %s to the older event: its ordering key waits behind it", a)
	}
	if found := t.effects(1, 1, newer.key); found.text != "" {
		return found
	}
	return t.effects(0, 1, older.key) // it may have decided that the newer one is what counts
}

// Bounds of the load.
const (
	maxInFlight = 256
	repeatEvery = 10 // one of so many events is sent twice
)

// A loaded event is one of the load, and what was answered to it. Most are sent once; what is not sent is as good as accepted.
type loaded struct {
	event
	answers [2]answer
}

func underLoad(t *trial) finding {
	events := make([]loaded, int(float64(t.Rate)*t.For.Seconds()))
	slots := make(chan struct{}, maxInFlight)
	var sending sync.WaitGroup
	began := time.Now()
	for i := range events {
		e := &events[i]
		e.event, e.answers[1].status = t.event(), http.StatusOK
		if !pause(t.ctx, time.Until(began.Add(time.Duration(i)*time.Second/time.Duration(t.Rate)))) {
			break
		}
		for j := range e.answers {
			if j == 0 || i%repeatEvery == 0 {
				slots <- struct{}{}
				sending.Go(func() {
					e.answers[j] = t.send(e.event)
					<-slots
				})
			}
		}
	}
	sending.Wait()
	bad, example := 0, answer{}
	for _, e := range events {
		for _, a := range e.answers {
			if !a.accepted() && !a.passing() {
				bad, example = bad+1, a
			} else if !a.accepted() {
				slots <- struct{}{}
				sending.Go(func() {
					t.deliver(e.again())
					<-slots
				})
			}
		}
	}
	sending.Wait()
	if bad > 0 {
		return fault("%d requests of %d events failed; to the last one it %s", bad, len(events), example)
	}
	end := time.Now().Add(t.Settle)
	for i, e := range events {
		if found := t.effectsUntil(end, 1, 1, e.key); found.text != "" {
			return found.about("event " + strconv.Itoa(i+1) + " of " + strconv.Itoa(len(events)) + ", " + e.key)
		}
	}
	return finding{}
}
