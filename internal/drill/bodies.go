package drill

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

func exactBytes(t *trial) []event {
	e := t.event()
	return []event{e.with([]byte("\n\t " + string(e.body) + " \r\n"))}
}

func largeBody(t *trial) []event { return []event{t.event().padded(t.MaxBody)} }

func parsedFirst(t *trial) finding {
	e := t.event().signedBy("", stranger())
	good, bad := t.send(e), t.send(e.with([]byte(`{"drill":`)))
	if good.refused() && bad.status != good.status {
		return advice("with a wrong signature it %s, and where the body is no JSON either it %s: strangers reach the parser", good, bad)
	}
	return finding{}
}

func notJSON(t *trial) finding {
	e := t.event()
	switch a := t.send(e.with([]byte(`{"drill":` + e.key))); {
	case a.final():
		return t.effects(0, 0, e.key)
	case a.status == http.StatusAccepted:
		return finding{} // it has recorded the event, and whoever works it finds out
	case a.accepted():
		return t.effects(1, 1, e.key) // it need not read the body
	default:
		return fault("it %s: a relay sends for hours what will never be right, and holds up what comes behind it", a)
	}
}

// excess is how many times larger than allowed a body is that must be refused.
const excess = 16

func tooLarge(t *trial) finding {
	e := t.event().padded(excess * t.MaxBody)
	a := t.send(e)
	if found := t.effects(0, 0, e.key); found.text != "" || !a.accepted() { // to close the connection is an answer, too
		return found.about("with a body of that size")
	}
	return fault("it %s to a body of %d MiB: a few of them take its memory", a, len(e.body)>>20)
}

func chunked(t *trial) finding {
	e := t.event()
	header, body := t.request(e)
	if a := t.exchange(t.ctx, http.MethodPost, header, io.MultiReader(bytes.NewReader(body)), t.Timeout); !a.accepted() {
		return fault("it %s", a)
	}
	return t.effects(1, 1, e.key)
}

func cutBody(t *trial) finding {
	e := t.event()
	head, body := t.raw(e)
	return t.cut(e, firstGap, append(head, body[:len(body)/2]...)) // after a while, so that it has begun to read
}

// stalls reports whether the receiver lets a connection stall for as long as [Config.Patience]. more is written once a second.
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

func slowBody(t *trial) finding {
	head, body := t.raw(t.event().padded(t.MaxBody))
	w, err := t.dial()
	if err != nil {
		return fault("%v", err)
	}
	defer func() { _ = w.Close() }()
	_ = w.write(0, append(head, body[:1]...))
	if t.stalls(w, []byte(" ")) {
		return advice("after %s it still waits for a body of which a byte comes each second: a few hundred of them, and nothing else is served", t.Patience)
	}
	return finding{}
}

// halves is how many connections stall at once.
const halves = 10

func halfRequest(t *trial) finding {
	var last *wire
	for range halves {
		w, err := t.dial()
		if err != nil {
			return fault("%v", err)
		}
		defer func() { _ = w.Close() }()
		head, body := t.raw(t.event())
		if err := w.write(0, head, body); err != nil {
			return fault("it closed a connection: %v", err)
		}
		if a := w.read(t.Timeout); !a.accepted() {
			return fault("it %s to a valid event", a)
		}
		_ = w.write(0, head[:len(head)/2]) // it may have closed the connection, which is right
		last = w
	}
	if a := t.send(t.event()); !a.accepted() {
		return fault("it %s to a valid event while %d connections had sent half of a request", a, halves)
	}
	if t.stalls(last, nil) {
		return advice("after %s it still waits for the second half of a request's headers", t.Patience)
	}
	return finding{}
}

func splitRequest(t *trial) finding {
	e := t.event()
	head, body := t.raw(e)
	if a := t.sendRaw(2*firstGap, head[:10], head[10:len(head)/2], head[len(head)/2:], body[:len(body)/2], body[len(body)/2:]); !a.accepted() {
		return fault("it %s", a)
	}
	return t.effects(1, 1, e.key)
}

func headerCase(t *trial) finding {
	e := t.event()
	for _, change := range [...]func(string) string{strings.ToLower, strings.ToUpper} {
		head, body := t.raw(e)
		lines := strings.Split(string(head), "\r\n")
		for i, line := range lines[1:] {
			name, value, _ := strings.Cut(line, ": ")
			if value != "" {
				lines[i+1] = change(name) + ": " + value
			}
		}
		if a := t.sendRaw(0, []byte(strings.Join(lines, "\r\n")), body); !a.accepted() {
			return fault("it %s to headers spelled like %s", a, change(webhook.IdempotencyKey))
		}
		e = e.again()
	}
	return t.effects(1, 1, e.key)
}
