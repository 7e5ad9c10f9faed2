package natspost

import (
	"bytes"
	"encoding/json"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A waiter is an attempt that waits for what the server answers.
type waiter struct {
	subject string // that it publishes to, or asks on
	number  uint64 // of the attempt, on its connection
	// refused is called, if it is not nil, when the server refuses what is asked, or ends the connection.
	refused func(error)
	answers chan answer // the first one; nil: there is none but a refusal
}

// An answer is what ends a wait: a message of the server, or why there will be none.
type answer struct {
	message *nats.Msg
	err     error
}

// A publication is a waiter with what its message needs. It is used again: to make all this costs more than to send the message.
type publication struct {
	waiter
	message  nats.Msg
	values   []string // of the headers
	since    time.Time
	deadline time.Time
	timer    *time.Timer // fires at the deadline
}

// newPublication returns what a client keeps for its next publication.
func newPublication() any {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	p := &publication{timer: timer, values: make([]string, 0, 32), message: nats.Msg{Header: nats.Header{}}}
	p.answers = make(chan answer, 1)
	return p
}

// begin returns a publication to a subject, whose time begins now.
func (c *Client) begin(subject string) *publication {
	p := c.publications.Get().(*publication)
	p.subject, p.message.Subject, p.since = subject, subject, time.Now()
	p.deadline = p.since.Add(c.cfg.Timeout)
	p.timer.Reset(c.cfg.Timeout)
	return p
}

// end ends the use of a publication, for which no connection waits any more.
func (c *Client) end(p *publication) {
	p.timer.Stop()
	select {
	case <-p.answers:
	default:
	}
	clear(p.message.Header)
	clear(p.values)
	p.values, p.message.Data = p.values[:0], nil
	if cap(p.values) <= maxValues {
		c.publications.Put(p)
	}
}

// maxValues is how many headers may be many: memory for more is not kept.
const maxValues = 128

// set sets a header of the message.
func (p *publication) set(name, value string) {
	p.values = append(p.values, value)
	n := len(p.values)
	p.message.Header[name] = p.values[n-1 : n : n]
}

// answer ends the wait, unless something else has ended it. The caller holds the mutex of the connection.
func (w *waiter) answer(a answer) {
	if w.refused != nil && a.err != nil {
		w.refused(a.err)
	}
	select {
	case w.answers <- a:
	default:
	}
}

// An ack is an acknowledgement of a stream.
type ack struct {
	Stream    string              `json:"stream"`
	Sequence  uint64              `json:"seq"`
	Duplicate bool                `json:"duplicate"`
	Error     *jetstream.APIError `json:"error"`
}

// parseAck returns what a stream has answered, and an error if it has not stored the message.
func (c *Client) parseAck(m *nats.Msg) (duplicate bool, err error) {
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		return false, nats.ErrNoResponders
	}
	if rest, usual := bytes.CutPrefix(m.Data, c.usualAck); usual && isEnd(rest) {
		return false, nil
	}
	var a ack
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return false, jetstream.ErrInvalidJSAck
	}
	switch {
	case a.Error != nil:
		return false, a.Error
	case a.Stream != c.cfg.Stream || a.Sequence == 0: // of a program that is not the stream: nothing is stored
		return false, jetstream.ErrInvalidJSAck
	}
	return a.Duplicate, nil
}

// isEnd reports whether this is a number above 0 and the end of an object of JSON.
func isEnd(b []byte) bool {
	digits, closed := bytes.CutSuffix(b, []byte("}"))
	return closed && len(digits) > 0 && len(digits) <= 20 && digits[0] != '0' && len(bytes.Trim(digits, "0123456789")) == 0
}
