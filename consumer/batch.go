package consumer

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A batchedEvent is one event of a batch, and what became of it, before it is known whether the
// batch commits.
type batchedEvent struct {
	request
	r      *http.Request
	report Report
	answer *answer // nil: the handler ended without one
}

// serveBatch works the events of a batch in one transaction, a savepoint each, and answers when
// that has ended.
func (rc *receiver) serveBatch(w http.ResponseWriter, r *http.Request) {
	all, refusal := rc.checkBatch(w, r)
	if refusal != nil {
		rq := request{Request: memory.Request{Began: time.Now(), Header: r.Header}}
		rc.finish(w, r, &rq, Report{Result: ResultRejected, Err: refusal}, refusal.answer())
		return
	}
	for rest := all; len(rest) > 0; {
		rest = rest[rc.commitTogether(w, r, rest):]
	}
	var body []byte
	for _, b := range all {
		rc.conclude(b.r, &b.request, b.report, b.answer)
		body = webhook.AppendLine(body, b.answer.inBatch(b.Header.Get(webhook.IdempotencyKey)))
	}
	(&answer{status: http.StatusOK, header: http.Header{"Content-Type": {webhook.BatchResultType}}, body: body}).send(w)
}

// commitTogether works the first events in one transaction, commits it, and returns how many these
// are: all, unless one met a conflict, left something in the transaction that the next must not
// find, or they took longer than Limits.BatchLocks. What is locked so far is released then.
func (rc *receiver) commitTogether(w http.ResponseWriter, r *http.Request, events []*batchedEvent) (n int) {
	batch := rc.batches.Batch()
	defer batch.Rollback()
	one := *rc
	one.memory = batch
	began := time.Now()
	for _, b := range events {
		if n++; b.answer != nil {
			continue
		}
		one.workInBatch(w, b)
		if batch.Ended() {
			rc.Breaker.Leave(b.pass, time.Now(), breaker.Unknown, nil)
			b.report, b.answer, b.entered = Report{}, nil, time.Time{}
			n--
			break
		}
		if sqlstate.IsConflict(b.report.Err) || time.Since(began) > rc.Limits.BatchLocks {
			break
		}
	}
	// The client may have gone by now, as in run.
	lasting, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), rc.Limits.CommitTimeout)
	defer cancel()
	err := batch.Commit(lasting)
	for _, b := range events[:n] {
		if err != nil && b.answer != nil && b.answer.success() {
			b.report.Result, b.report.Err = ResultCommitFailed, err
			b.answer = unremembered(err).answer()
		}
		if b.answer == nil {
			b.answer = handlerPanicked().answer()
		}
	}
	return n
}

// workInBatch takes one event through its steps, in another goroutine: a handler may end its
// goroutine, and must not end the batch.
func (rc *receiver) workInBatch(w http.ResponseWriter, b *batchedEvent) {
	var handling sync.WaitGroup
	b.inBatch = b
	handling.Go(func() {
		defer func() { _ = recover() }() // http.ErrAbortHandler, which is reported
		rc.work(w, b.r, &b.request)
	})
	handling.Wait()
}

// checkBatch reads and verifies a batch without using the database. An event that is malformed has
// its answer already.
func (s *settings) checkBatch(w http.ResponseWriter, r *http.Request) (all []*batchedEvent, refusal *problem) {
	began := time.Now()
	events, err := webhook.BatchSize(r.Header)
	switch {
	case err != nil:
		refusal = batchInvalid(err)
	case s.Verify.AllowUnsigned:
	default:
		if err := webhook.Precheck(r.Header, began, s.Verify.Tolerance); err != nil {
			refusal = s.unproven(err)
		}
	}
	if refusal != nil {
		leaveUnread(w, r)
		return nil, refusal
	}
	body, room, refusal := s.readBody(w, r)
	defer s.unverified.give(room)
	if refusal != nil {
		return nil, refusal
	}
	if !s.Verify.AllowUnsigned {
		if err := webhook.VerifyBatch(r.Header, body, began, s.Verify.Tolerance, s.secrets...); err != nil {
			return nil, s.unproven(err)
		}
		s.senders.add(r.RemoteAddr)
	}
	envelopes, err := webhook.ParseBatch(body, events)
	if err != nil {
		return nil, batchInvalid(err)
	}
	for _, e := range envelopes {
		all = append(all, s.checkEnvelope(r, e, began))
	}
	return all, nil
}

// checkEnvelope returns the request of an event of a batch. Its handler gets the same as if the
// event had come alone.
func (s *settings) checkEnvelope(r *http.Request, e webhook.Envelope, began time.Time) *batchedEvent {
	header := r.Header.Clone()
	maps.DeleteFunc(header, func(name string, _ []string) bool {
		return name == webhook.Batch || name == webhook.ID || name == webhook.Signature || name == "Content-Length"
	})
	for name, value := range e.Header {
		header[name] = []string{value}
	}
	key := header.Get(webhook.IdempotencyKey)
	if key != "" {
		header.Set(webhook.ID, webhook.DeriveID(key))
	}
	b := &batchedEvent{request: request{Request: memory.Request{Began: began, Header: header}}}
	b.r = r.Clone(r.Context())
	b.r.Header = header
	event, p := headers.Event{}, s.checkKeyHeaders(header)
	if _, nested := e.Header[webhook.Batch]; nested {
		p = batchInvalid(errors.New("an event of it has " + webhook.Batch))
	}
	if p == nil {
		event, p = eventOf(header, key)
	}
	if p = s.accept(&b.request, event, e.Body, p); p != nil {
		b.report, b.answer = Report{Result: ResultRejected, Err: p}, p.answer()
	}
	return b
}

// inBatch returns the answer as a line of the answer to a batch.
func (a *answer) inBatch(key string) webhook.BatchResult {
	result := webhook.BatchResult{Key: key, Status: a.status, RetryAfter: a.header.Get("Retry-After"), Replayed: a.header.Get(webhook.Replayed) != ""}
	if !a.success() && len(a.body) <= maxBatchAnswer {
		result.ContentType, result.Body = a.header.Get("Content-Type"), string(a.body)
	}
	return result
}

// maxBatchAnswer bounds what an answer keeps of the refusal of one event, in bytes. Cut, a problem
// could not be read.
const maxBatchAnswer = 2 << 10

func batchInvalid(err error) *problem {
	return newProblem(http.StatusBadRequest, "batch-invalid", "The batch is malformed", err.Error()+".")
}
