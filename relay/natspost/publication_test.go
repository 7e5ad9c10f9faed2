package natspost

import (
	"errors"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Only what a server writes for a stored message is one. Everything else goes to the decoder of JSON, or is no acknowledgement.
func TestAcknowledgements(t *testing.T) {
	t.Parallel()
	c := New(Config{Settings: Settings{Stream: "EVENTS", Subject: "outbox.{type}"}})
	full := &jetstream.APIError{Code: 503, ErrorCode: codeStoreFailed, Description: "maximum messages exceeded"}
	for text, want := range map[string]struct {
		duplicate bool
		err       error
	}{
		`{"stream":"EVENTS","seq":1}`:                                {},
		`{"stream":"EVENTS","seq":18446744073709551615}`:             {},
		`{"stream":"EVENTS", "seq": 1}`:                              {},
		`{"stream":"EVENTS","domain":"hub","seq":1}`:                 {},
		`{"stream":"OTHER","seq":1}`:                                 {err: jetstream.ErrInvalidJSAck},
		`{"stream":"EVENTS","seq":0}`:                                {err: jetstream.ErrInvalidJSAck},
		`{"stream":"EVENTS","seq":1,"duplicate": true}`:              {duplicate: true},
		`{"stream":"EVENTS","seq":1,"duplicate":true}`:               {duplicate: true},
		`{"stream":"EVENTS","domain":"h","seq":1,"duplicate": true}`: {duplicate: true},
		`{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"},"stream":"EVENTS","seq":0}`: {err: full},
		`{"stream":"EVENTS","seq":}`:    {err: jetstream.ErrInvalidJSAck},
		`{"stream":"EVENTS","seq":1`:    {err: jetstream.ErrInvalidJSAck},
		`{"stream":"EVENTS","seq":1}{`:  {err: jetstream.ErrInvalidJSAck},
		`{"stream":"EVENTS","seq":-1e}`: {err: jetstream.ErrInvalidJSAck},
		`{"stream":"EVENTS","seq":1,"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}`: {err: full},
		`{"stream":"","seq":1}`: {err: jetstream.ErrInvalidJSAck},
		`{}`:                    {err: jetstream.ErrInvalidJSAck},
		`+OK`:                   {err: jetstream.ErrInvalidJSAck},
		``:                      {err: jetstream.ErrInvalidJSAck},
	} {
		duplicate, err := c.parseAck(&nats.Msg{Data: []byte(text)})
		var api, wanted *jetstream.APIError
		if errors.As(err, &api) && errors.As(want.err, &wanted) && *api == *wanted {
			err = want.err
		}
		if duplicate != want.duplicate || !errors.Is(err, want.err) {
			t.Errorf("%s: %t, %v; want %t, %v", text, duplicate, err, want.duplicate, want.err)
		}
	}
	nothing := &nats.Msg{Header: nats.Header{"Status": {"503"}}}
	if _, err := c.parseAck(nothing); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("no responders: %v", err)
	}
}

// An answer to an attempt that has ended must not become that of a later one: the event would be lost.
func TestLateAnswerIsNotThatOfAnotherAttempt(t *testing.T) {
	t.Parallel()
	c := New(Config{Timeout: 1, Settings: Settings{Stream: "EVENTS", Subject: "outbox.{type}"}})
	to := &conn{nats: &nats.Conn{}, inbox: "_INBOX.x.", waiting: map[uint64]*waiter{}}
	first := c.begin("outbox.a")
	if !to.begin(&first.waiter) {
		t.Fatal("the connection takes no attempt")
	}
	ack := func(number string) {
		to.acknowledged(&nats.Msg{Subject: "_INBOX.x." + number, Data: []byte(`{"stream":"EVENTS","seq":1}`)})
	}
	ack("1")
	ack("1") // the second one finds no room
	to.end(&first.waiter)
	c.end(first)
	second := c.begin("outbox.b")
	if !to.begin(&second.waiter) {
		t.Fatal("the connection takes no attempt")
	}
	ack("1")
	ack("")
	ack("-")
	to.acknowledged(&nats.Msg{Subject: "_INBOX.y.2"})
	if len(second.answers) != 0 {
		t.Fatal("an answer to another attempt arrived")
	}
	if len(second.message.Header) != 0 || len(second.values) != 0 {
		t.Errorf("headers of another message are left: %v", second.message.Header)
	}
	ack("2")
	if len(second.answers) != 1 {
		t.Fatal("the answer did not arrive")
	}
}
