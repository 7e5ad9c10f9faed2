package consumer

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/message"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// request is a verified request and what became of it so far.
type request struct {
	memory.Request
	handled time.Duration // how long the handler took
	pass    breaker.Pass  // of Config.Breaker
	entered time.Time     // when that let the request in; zero: it has not
	took    time.Duration // from then until it was known what became of the event
	ended   error         // why the context had ended by then; nil: it had not
	inBatch *batchedEvent // where what became of an event of a batch is kept; nil: it came alone
}

// check reads and verifies a request without using the database. A nil problem means that the
// request may be processed.
func (s *settings) check(w http.ResponseWriter, r *http.Request) (request, *problem) {
	rq := request{Request: memory.Request{Began: time.Now(), Header: r.Header}}
	arrived, stored := message.StoredAt(r.Context())
	if !stored {
		arrived = rq.Began
	}
	// Headers come first: the body of an unsigned request is not read.
	if p := s.checkHeaders(r.Header, arrived); p != nil {
		leaveUnread(w, r)
		return rq, p
	}
	body, room, p := s.readBody(w, r)
	defer s.unverified.give(room)
	if p != nil {
		return rq, p
	}
	event, p := s.verify(r.Header, body, arrived)
	if p == nil && !s.Verify.AllowUnsigned {
		s.senders.add(r.RemoteAddr)
	}
	p = s.accept(&rq, event, body, p)
	return rq, p
}

// accept completes the request of an event that is proven, unless there is a problem, or it is for
// another receiver.
func (s *settings) accept(rq *request, event headers.Event, body []byte, p *problem) *problem {
	if p == nil && len(s.Destinations) > 0 && (!event.Foreign || event.Destination != "") && !slices.Contains(s.Destinations, event.Destination) {
		p = newProblem(http.StatusMisdirectedRequest, "wrong-destination", "The request was sent to another destination",
			fmt.Sprintf("It is signed for the destination %q, which is not among this receiver's (Config.Destinations).", event.Destination))
	}
	if p != nil {
		return p
	}
	event.Receiver, event.Source, event.Payload = s.Receiver, s.Source, nil
	rq.Event, rq.Body, rq.Hash = event, body, sha256.Sum256(body)
	return nil
}

func (s *settings) checkHeaders(header http.Header, arrived time.Time) *problem {
	if s.Verify.Custom != nil {
		return nil
	}
	if p := s.checkKeyHeaders(header); p != nil || s.Verify.AllowUnsigned {
		return p
	}
	if err := webhook.Precheck(header, arrived, s.Verify.Tolerance); err != nil {
		return s.unproven(err)
	}
	return nil
}

func (s *settings) checkKeyHeaders(header http.Header) *problem {
	key, id := header.Get(webhook.IdempotencyKey), header.Get(webhook.ID)
	switch {
	case len(header[webhook.IdempotencyKey]) > 1 || len(header[webhook.ID]) > 1:
		return newProblem(http.StatusBadRequest, "key-repeated", "The request names its key more than once",
			"Send "+webhook.IdempotencyKey+" and webhook-id once each: the receiver must not guess which one counts.")
	case key == "" && !s.Verify.AcceptForeign:
		return newProblem(http.StatusBadRequest, "key-missing", "The request has no idempotency key",
			"Send the event's key as "+webhook.IdempotencyKey+", the same on every attempt.")
	case key == "" && id == "":
		return newProblem(http.StatusBadRequest, "key-missing", "The request has no idempotency key",
			"Send the event's key as "+webhook.IdempotencyKey+" or webhook-id, the same on every attempt.")
	}
	return nil
}

// verify returns the event that header and body prove.
func (s *settings) verify(header http.Header, body []byte, arrived time.Time) (headers.Event, *problem) {
	switch {
	case s.Verify.Custom != nil:
		return s.verifyOwn(header, body, arrived)
	case s.Verify.AllowUnsigned:
		return unsignedEvent(header)
	}
	verified, err := webhook.Verify(header, body, arrived, s.Verify.Tolerance, s.secrets...)
	switch {
	case err != nil:
		return headers.Event{}, s.unproven(err)
	case verified == webhook.VerifiedX1:
		return eventOf(header, header.Get(webhook.IdempotencyKey))
	case !s.Verify.AcceptForeign:
		return headers.Event{}, signatureInvalid("Only the plain Standard Webhooks signature (v1) matches: either headers were changed " +
			"on the way, or the sender is no outbox-relay and Config.Verify.AcceptForeign is needed.")
	}
	id := header.Get(webhook.ID)
	if webhook.IsDerivedID(id) {
		return headers.Event{}, signatureInvalid("The webhook-id is an outbox-relay's, but its signature over the headers (x1) is " +
			"missing or does not match: headers were changed on the way.")
	}
	if !headers.Printable(id) {
		return headers.Event{}, keyInvalid(webhook.ID)
	}
	return headers.Event{IdempotencyKey: id, Version: 1, Foreign: true}, nil
}

// unproven returns the refusal for an error of package webhook.
func (s *settings) unproven(err error) *problem {
	if errors.Is(err, webhook.ErrTooOld) || errors.Is(err, webhook.ErrTooNew) {
		return newProblem(http.StatusUnauthorized, "timestamp-out-of-tolerance", "The request is not recent",
			fmt.Sprintf("%v: compare the clocks of both machines; this receiver tolerates %v.", err, s.Verify.Tolerance))
	}
	return signatureInvalid(err.Error() + ".")
}

func keyInvalid(name string) *problem {
	return newProblem(http.StatusBadRequest, "key-invalid", "The idempotency key is malformed",
		fmt.Sprintf("%s must be 1 to %d printable ASCII characters.", name, headers.MaxTextBytes))
}

func signatureInvalid(detail string) *problem {
	return newProblem(http.StatusUnauthorized, "signature-invalid", "The request's signature is not valid", detail)
}
