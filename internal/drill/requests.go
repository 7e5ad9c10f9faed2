package drill

import (
	"bytes"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// fine sends events that must be accepted and take effect once each.
func fine(events func(*trial) []event) func(*trial) {
	return func(t *trial) {
		for _, e := range events(t) {
			t.which = e.which
			t.accepts(e)
			t.effects(1, 1, e.key)
		}
	}
}

func oneMore(t *trial) []event { return []event{t.event()} }

func exactBytes(t *trial) []event {
	e := t.event()
	return []event{e.with([]byte("\n\t " + string(e.body) + " \r\n"))}
}

func largeBody(t *trial) []event { return []event{t.event().padded(t.MaxBody)} }

func parsedFirst(t *trial) {
	e := t.event().signedBy("", stranger())
	good, bad := t.send(e), t.send(e.with([]byte(`{"drill":`)))
	if good.refused() && bad.status != good.status {
		t.advise("with a wrong signature it %s, and where the body is no JSON either it %s: strangers reach the parser", good, bad)
	}
}

func notJSON(t *trial) {
	e := t.event()
	switch a := t.send(e.with([]byte(`{"drill":` + e.key))); {
	case a.final():
		t.effects(0, 0, e.key)
	case !a.accepted():
		t.fault("it %s: a relay sends for hours what will never be right, and holds up what comes behind it", a)
	case a.status != http.StatusAccepted: // otherwise it has recorded the event, and whoever works it finds out
		t.effects(1, 1, e.key) // it need not read the body
	}
}

// excess is how many times larger than allowed a body is that must be refused.
const excess = 16

func tooLarge(t *trial) {
	e := t.event().padded(excess * t.MaxBody)
	a := t.send(e)
	t.effects(0, 0, e.key)
	if a.accepted() { // to close the connection is an answer, too
		t.fault("it %s to a body of %d MiB: a few of them take its memory", a, len(e.body)>>20)
	}
}

func chunked(t *trial) {
	e := t.event()
	header, body := t.request(e)
	if a := t.exchange(t.ctx, http.MethodPost, header, io.MultiReader(bytes.NewReader(body)), t.Timeout); !a.accepted() {
		t.fault("it %s", a)
	}
	t.effects(1, 1, e.key)
}

// stalls reports whether the receiver lets a connection stall for as long as [Config.Patience].
// more is written once a second.
func (t *trial) stalls(w *wire, more []byte) bool {
	for end := time.Now().Add(t.Patience); time.Now().Before(end) && t.ctx.Err() == nil; {
		_ = w.SetDeadline(time.Now().Add(min(time.Second, t.Patience)))
		if _, err := w.Write(more); err != nil {
			return false
		}
		if _, err := w.reader.Peek(1); !isTimeout(err) {
			return false // closed, or answered
		}
	}
	return true
}

func slowBody(t *trial) {
	head, body := t.raw(t.event().padded(t.MaxBody))
	w := t.dial()
	defer func() { _ = w.Close() }()
	_ = w.write(0, head, body[:1])
	if t.stalls(w, []byte(" ")) {
		t.advise("after %s it still waits for a body of which a byte comes each second: a few hundred of them, and nothing else is served", t.Patience)
	}
}

// halves is how many connections stall at once.
const halves = 10

func halfRequest(t *trial) {
	var last *wire
	for range halves {
		last = t.dial()
		defer func() { _ = last.Close() }()
		head, body := t.raw(t.event())
		_ = last.write(0, head, body)
		if a := last.read(t.Timeout); !a.accepted() {
			t.fault("it %s to a valid event", a)
		}
		_ = last.write(0, head[:len(head)/2]) // it may have closed the connection, which is right
	}
	t.which = "while connections had sent half of a request"
	t.accepts(t.event())
	if t.which = ""; t.stalls(last, nil) {
		t.advise("after %s it still waits for the second half of a request's headers", t.Patience)
	}
}

func splitRequest(t *trial) {
	e := t.event()
	head, body := t.raw(e)
	if a := t.sendRaw(2*firstGap, head[:10], head[10:len(head)/2], head[len(head)/2:], body[:len(body)/2], body[len(body)/2:]); !a.accepted() {
		t.fault("it %s", a)
	}
	t.effects(1, 1, e.key)
}

func headerCase(t *trial) {
	e := t.event()
	for _, change := range [...]func(string) string{strings.ToLower, strings.ToUpper} {
		head, body := t.raw(e)
		lines := strings.Split(string(head), "\r\n")
		for i, line := range lines[1:] {
			if name, value, found := strings.Cut(line, ": "); found {
				lines[i+1] = change(name) + ": " + value
			}
		}
		if a := t.sendRaw(0, []byte(strings.Join(lines, "\r\n")), body); !a.accepted() {
			t.fault("it %s to headers spelled like %s", a, change(webhook.IdempotencyKey))
		}
		e = e.again()
	}
	t.effects(1, 1, e.key)
}

// unhandled sends an event for which there is no handler.
func unhandled(change func(*event)) func(*trial) {
	return func(t *trial) {
		e := t.event()
		change(&e)
		if a := t.send(e); !a.accepted() && !a.final() {
			t.fault("it %s: a relay sends the event for hours, and holds up what comes behind it", a)
		}
	}
}

func reordered(t *trial) {
	older, newer, order := t.event(), t.event(), t.event().key
	at := func(e event) event {
		return e.covering(func(h http.Header) {
			h[webhook.OrderingKey], h[webhook.Sequence] = []string{order}, []string{strconv.FormatInt(e.id, 10)}
		})
	}
	t.accepts(at(newer))
	if a := t.send(at(older)); !a.accepted() {
		t.fault("it %s to the older event: its ordering key waits behind it", a)
	}
	t.effects(1, 1, newer.key)
	t.effects(0, 1, older.key) // it may have decided that the newer one is what counts
}

// Bounds of the load.
const (
	maxInFlight = 256
	repeatEvery = 10 // one of so many events is sent twice
)

func underLoad(t *trial) {
	events := make([]event, int(float64(t.Rate)*t.For.Seconds()))
	answers := make(chan answer, 2*len(events))
	var sending errgroup.Group
	sending.SetLimit(maxInFlight)
	began := time.Now()
	for i := range events {
		events[i] = t.event()
		_ = sleep.For(t.ctx, time.Until(began.Add(time.Duration(i)*time.Second/time.Duration(t.Rate))))
		for j := range 2 {
			if j == 1 && i%repeatEvery > 0 {
				continue
			}
			sending.Go(func() error {
				a := t.send(events[i])
				if a.passing() {
					a = t.deliver(events[i].again())
				}
				answers <- a
				return nil
			})
		}
	}
	_ = sending.Wait()
	close(answers)
	bad, example := 0, answer{}
	for a := range answers {
		if !a.accepted() {
			bad, example = bad+1, a
		}
	}
	if bad > 0 {
		t.fault("%d requests of %d events failed; to the last one it %s", bad, len(events), example)
	}
	end := time.Now().Add(t.Settle)
	for i, e := range events {
		t.which = "event " + strconv.Itoa(i+1) + " of " + strconv.Itoa(len(events)) + ", " + e.key
		t.effectsUntil(end, 1, 1, e.key)
	}
}
