package post

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/mask"
	"github.com/outbox-relay/outbox-relay/internal/relay/batchpost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// maxBatchAnswer bounds what is read of the answer to a batch, in bytes: each of its events may
// have the text of a problem.
const maxBatchAnswer = 4 << 20

// A Batch says whether events that wait at the same time share a request. The zero value: each has
// its own.
type Batch struct {
	// Max is how many events a request may have, at most [webhook.MaxBatchEvents], and never more
	// than MaxInFlight, which counts events. 0 or 1: requests of single events.
	Max int
}

// batchProblems returns the mistakes in a destination's Batch.
func (d Destination) batchProblems(path string) []check.Problem {
	var v check.Problems
	v.Require(d.Batch.Max >= 0 && d.Batch.Max <= webhook.MaxBatchEvents, path+".batch.max",
		"%d is out of range; write 1 to %d events: 1 sends each event by itself", d.Batch.Max, webhook.MaxBatchEvents)
	v.Require(d.Batch.Max <= 1 || d.MaxInFlight != 1, path+".batch.max",
		"%d has no effect while max_in_flight is 1, which counts events; raise that to some multiples of batch.max, or write batch: {max: 1}", d.Batch.Max)
	return v
}

// overBatches is the [carrier] of http and https with batches. The first attempts of events share
// requests once the receiver has said that it takes batches; an event that has failed is sent
// alone, so that it fails no other one twice.
type overBatches struct {
	overHTTP
	group *batchpost.Group
	offer *batchpost.Offer
}

// newBatches returns the carrier of an endpoint of HTTP with batches.
func newBatches(e *Endpoint) carrier {
	c := &overBatches{overHTTP: overHTTP{e}, offer: &batchpost.Offer{}}
	c.group = &batchpost.Group{Max: e.Destination.Batch.Max, MaxBytes: webhook.MaxBatchBytes, Timeout: e.Destination.Timeout, Send: c.send}
	e.offer = c.offer
	return c
}

// Deliver implements [carrier].
func (c *overBatches) Deliver(ctx context.Context, m Message, ready func() *policy.Result) policy.Result {
	if made, _ := c.offer.Made(time.Now()); !made || ready != nil || m.Attempt > 1 || len(m.Payload) > webhook.MaxBatchBytes/2 {
		return c.overHTTP.Deliver(ctx, m, ready)
	}
	var req Request
	if _, err := req.describe(nil, c.to, &m, false); err != nil {
		return Refused(err)
	}
	envelope := webhook.Envelope{Header: make(map[string]string, len(req.header)), Body: m.Payload}
	for _, f := range req.header {
		envelope.Header[f.name] = f.value
	}
	call := &batchpost.Call{Key: *m.Key, Line: webhook.AppendLine(nil, envelope), Sent: envelope.Header}
	single, cancel := context.WithTimeout(ctx, c.to.Destination.Timeout) // also with the batch before it
	defer cancel()
	if len(call.Line) <= webhook.MaxBatchBytes {
		if c.group.Do(ctx, call); !call.Alone {
			call.Result.DroppedHeaders = req.dropped
			return call.Result
		}
	}
	return c.overHTTP.Deliver(single, m, nil)
}

// send makes the one request of a batch.
func (c *overBatches) send(ctx context.Context, batch []*batchpost.Call) {
	e := c.to
	e.begin()
	defer e.end()
	defer func() { batch[0].Result.Batch = len(batch) }()
	lines := make([][]byte, len(batch))
	for i, call := range batch {
		lines[i] = call.Line
	}
	body := slices.Concat(lines...)
	req := &Request{to: e, header: slices.Clone(e.header)}
	req.set("Content-Type", webhook.BatchType)
	count := strconv.Itoa(len(batch))
	req.set(webhook.Batch, count)
	if e.authorization != nil {
		req.set("Authorization", e.authorization())
	}
	signed := e.signer.SignBatch(webhook.AppendCovered(appendCovered(nil, e.header), webhook.Batch, count), body, time.Now())
	req.header = append(req.header, field{webhook.ID, signed.ID}, field{webhook.Timestamp, signed.Timestamp})
	if signed.Signature != "" {
		req.header = append(req.header, field{webhook.Signature, signed.Signature})
	}
	caller := context.WithoutCancel(ctx) // whose deadline is the destination's timeout
	resp, connected, err := e.roundTrip(ctx, req.HTTP(body), body)
	if err != nil {
		setAll(batch, e.failed(caller, req, connected, err))
		return
	}
	defer func() { _ = resp.Body.Close() }()
	masked := sync.OnceValue(func() *mask.Mask { return maskOf(e, headersOf(req, batch)) })
	is2xx := resp.StatusCode >= 200 && resp.StatusCode <= 299
	if is2xx && !webhook.HasType(resp.Header, webhook.BatchResultType) || doesNotTakeBatches(resp.StatusCode) {
		_, _ = io.CopyN(io.Discard, resp.Body, maxDrain)
		e.learn(false, "it answered a batch with "+resp.Status)
		for _, call := range batch {
			call.Alone = true
		}
		return
	}
	if !is2xx {
		excerpt := excerptOf(resp, e.Destination.Wire.Excerpts, masked)
		setAll(batch, policy.ClassifyResponse(resp.StatusCode, resp.Header, excerpt, e.Destination.Responses, time.Now()))
		return
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxBatchAnswer))
	if err != nil {
		setAll(batch, e.failed(caller, req, true, err))
		return
	}
	results := webhook.ParseBatchResults(answer)
	for _, call := range batch {
		result, found := results[call.Key]
		if !found {
			call.Result = policy.Result{Reason: policy.ReasonMalformed, Posted: true, Message: "the answer to the batch does not say what became of this event"}
			continue
		}
		call.Result = c.classify(result, masked)
	}
}

// headersOf returns what a batch has sent in headers: its own, and those of its events.
func headersOf(req *Request, batch []*batchpost.Call) http.Header {
	all := req.Header()
	for _, call := range batch {
		for name, value := range call.Sent {
			all[name] = append(all[name], value)
		}
	}
	return all
}

// classify returns the result of an event's answer, which means what the answer to a request of its
// own would mean.
func (c *overBatches) classify(r webhook.BatchResult, masked func() *mask.Mask) policy.Result {
	single := &http.Response{
		StatusCode: r.Status, Body: io.NopCloser(strings.NewReader(r.Body)),
		Header: http.Header{"Content-Type": {r.ContentType}, "Retry-After": {r.RetryAfter}},
	}
	excerpt := ""
	if r.Status > 299 {
		excerpt = excerptOf(single, c.to.Destination.Wire.Excerpts, masked)
	}
	return policy.ClassifyResponse(r.Status, single.Header, excerpt, c.to.Destination.Responses, time.Now())
}

// doesNotTakeBatches reports whether a status may be about the batch and not about its events, so
// that each is sent by itself. What time resolves, and a redirect, would meet the single ones, too.
func doesNotTakeBatches(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusLocked, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return status >= 400 && status <= 499 || status == http.StatusNotImplemented
}

func setAll(batch []*batchpost.Call, v policy.Result) {
	for _, call := range batch {
		call.Result = v
	}
}

// learn notes, and logs, what an answer says of batches.
func (e *Endpoint) learn(made bool, why string) {
	if e.offer == nil || !e.offer.Learn(time.Now(), made) {
		return
	}
	if made {
		e.Log.Info().Str("destination", e.Destination.Name).Msg("the receiver takes batches")
		return
	}
	e.Log.Warn().Str("destination", e.Destination.Name).Str("why", why).
		Msg("the receiver does not take batches: events are sent one by one; it is asked again in some hours, or when its settings are changed")
}

// asksForBatches reports whether the answer to a single event is to be read for whether its
// receiver takes batches.
func (e *Endpoint) asksForBatches() bool {
	if e.offer == nil {
		return false
	}
	_, asking := e.offer.Made(time.Now())
	return asking
}
