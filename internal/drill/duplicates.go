package drill

import (
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// firstPatience is how much longer than a relay the drill waits for its first answer, to say how
// late it is.
const firstPatience = 30 * time.Second

func valid(t *trial) {
	t.first = t.event()
	switch a := t.sendWithin(t.first, t.Timeout+firstPatience); {
	case a.status == http.StatusUnprocessableEntity:
		t.fault("it %s: name a type that it handles with --type, and such a payload with --payload", a)
	case !a.accepted():
		t.fault("it %s", a)
	case a.took > t.Timeout:
		t.fault("it answered after %s: a relay gives up after %s, and sends the event again and again", a.took.Round(time.Millisecond), t.Timeout)
	}
	t.effects(1, 1, t.first.key)
	t.audits = nil // late-duplicate looks at it again
}

// hurried is how many events are sent one by one to see whether effects are there when the answer
// is.
const hurried = 20

func afterCommit(t *trial) {
	late := 0
	for range hurried {
		e := t.event()
		if t.accepts(e) == http.StatusAccepted { // it says itself that the effect comes later
			t.effects(1, 1, e.key)
		} else if t.count(e.key) == 0 {
			late++
		}
	}
	if late > 0 {
		t.fault("%d of %d effects were not there when the answer was: should the receiver crash between the two, the event is lost", late, hurried)
	}
}

// repeated sends an event, and then once more with a change.
func repeated(change func(event) event) func(*trial) {
	return func(t *trial) {
		e := t.event()
		t.accepts(e)
		t.repeat(change(e.again()))
	}
}

// repeat sends an event that was accepted once more.
func (t *trial) repeat(e event) {
	a := t.send(e)
	t.effects(1, 1, e.key)
	if a.final() {
		t.fault("it %s to a duplicate: a relay takes the event, which took effect, for failed", a)
	} else if !a.accepted() {
		t.fault("it %s to a duplicate: a relay sends it for hours, and then takes the event, which took effect, for failed", a)
	}
}

func lateDuplicate(t *trial) { t.repeat(t.first.again()) }

// Equal requests at once, and how often: the first crowd still opens its connections, so that the
// later ones are closer together.
const (
	crowd  = 20
	crowds = 5
)

func atOnce(t *trial) {
	for range crowds {
		e := t.event()
		answers := make([]answer, crowd)
		var sending sync.WaitGroup
		for i := range answers {
			sending.Go(func() { answers[i] = t.send(e) })
		}
		sending.Wait()
		last := t.deliver(e.again())
		t.effects(1, 1, e.key)
		for _, a := range answers {
			if !a.accepted() && !a.passing() {
				t.fault("it %s to one of %d equal requests: a relay counts that as a failure of the receiver", a, crowd)
			}
		}
		if !last.accepted() {
			t.fault("it %s even when no other request was under way", last)
		}
	}
}

// cuts are how long after its request a connection is cut.
var cuts = [...]time.Duration{0, 0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond, 150 * time.Millisecond}

func cutBeforeAnswer(t *trial) {
	for _, after := range cuts {
		e := t.event()
		e.which = "cut " + after.String() + " after the request"
		head, body := t.raw(e)
		t.cut(e, after, append(head, body...))
	}
}

func cutBody(t *trial) {
	e := t.event()
	head, body := t.raw(e)
	t.cut(e, firstGap, append(head, body[:len(body)/2]...)) // after a while, so that it has begun to read
}

// cut sends some of an event's request, cuts the connection, and then sends the event until it is
// accepted.
func (t *trial) cut(e event, after time.Duration, begun []byte) {
	w := t.dial()
	_ = w.write(0, begun)
	_ = sleep.For(t.ctx, after)
	_ = w.Close()
	t.which = e.which
	if a := t.deliver(e.again()); !a.accepted() {
		t.fault("it %s to an event whose first request lost its connection", a)
	}
	t.effects(1, 1, e.key)
}

func keyReused(t *trial) {
	e := t.event()
	t.accepts(e)
	a := t.send(e.padded(len(e.body) + 1))
	t.effects(1, 1, e.key)
	if a.accepted() {
		t.advise("it %s: a producer that uses a key for two events by mistake never learns that one has no effect", a)
	} else if !a.final() {
		t.advise("it %s: a relay sends for hours what will never be right", a)
	}
}

// apart sends pairs of events that a receiver must not take for one.
func apart(pairs func(*trial) [][2]event) func(*trial) {
	return func(t *trial) {
		for _, pair := range pairs(t) {
			t.which = "of two events " + pair[1].which
			t.accepts(pair[0])
			t.accepts(pair[1])
			t.effects(2, 2, pair[0].key, pair[1].key)
		}
	}
}

func sameContent(t *trial) {
	first := t.event()
	second := t.event().with(first.body)
	t.accepts(first)
	if t.send(second).accepted() { // its business may know the content, such as an invoice's number, and refuse the event
		t.effects(2, 2, first.key, second.key)
	}
}

func sameEventID(t *trial) [][2]event {
	first, second := t.event(), t.event()
	second.id = first.id
	return [][2]event{{first, second}}
}

func keyCase(t *trial) [][2]event {
	lower := t.event()
	return [][2]event{{lower, t.eventOf(strings.ToUpper(lower.key))}}
}

// maxKey is how long a key may be, in bytes.
const maxKey = 255

func keyLong(t *trial) [][2]event {
	key := t.event().key
	key += strings.Repeat("x", maxKey-len(key)-1)
	return [][2]event{{t.eventOf(key + "1"), t.eventOf(key + "2")}}
}

func keyOdd(t *trial) (pairs [][2]event) {
	key := t.event().key
	for _, ends := range [...][2]string{{"%41", "A"}, {"+b", " b"}, {`/"c'\;=&?#<,>`, "/c"}} {
		second := t.eventOf(key + ends[1])
		second.which = "with keys that end in " + strconv.Quote(ends[0]) + " and " + strconv.Quote(ends[1])
		pairs = append(pairs, [2]event{t.eventOf(key + ends[0]), second})
	}
	return pairs
}

func keyUTF8(t *trial) {
	for _, end := range [...]string{"-Größe-名", "-\xff"} {
		if a := t.send(t.eventOf(t.event().key + end)); !a.accepted() && !a.refused() {
			t.advise("it %s to a key that ends in %q", a, end)
		}
	}
}

func keyBlanks(t *trial) {
	e := t.event()
	t.accepts(e)
	head, body := t.raw(e.again())
	const name = webhook.IdempotencyKey + ": "
	a := t.sendRaw(0, []byte(strings.Replace(string(head), name+e.key, name+" \t "+e.key+" \t ", 1)), body)
	t.effects(1, 1, e.key, e.key+" \t ", e.key+" \t")
	if !a.accepted() {
		t.fault("it %s", a)
	}
}
