package post

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/mask"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Bounds of what a receiver can make the relay read, in bytes.
const (
	maxResponseHeader = 64 << 10
	maxDrain          = 64 << 10 // of a body, so that the connection can be used again
)

// overHTTP is the [carrier] of http and https: one POST an attempt.
type overHTTP struct{ to *Endpoint }

// Deliver implements [carrier].
func (c overHTTP) Deliver(ctx context.Context, m Message, ready func() *policy.Result) policy.Result {
	req, ok := c.to.requests.Get().(*Request)
	if !ok {
		req = &Request{}
	}
	defer func() {
		*req = Request{} // what it says belongs to one event
		c.to.requests.Put(req)
	}()
	if err := req.express(c.to, &m, time.Now()); err != nil {
		return Refused(err)
	}
	if ready != nil {
		if instead := ready(); instead != nil {
			return *instead
		}
	}
	result := send(ctx, c.to, req, m.Payload)
	result.DroppedHeaders = req.dropped
	return result
}

// CloseIdleConnections implements [carrier].
func (c overHTTP) CloseIdleConnections() {
	c.to.Transport.CloseIdleConnections()
	if c.to.direct != nil {
		c.to.direct.closeIdle()
	}
}

// send makes exactly one request, within the timeout of its destination. It is a round trip of the
// transport, not a call of an http.Client, which would follow redirects: with a GET whose 200 looks
// like success, or with the body, key and signature to another host.
func send(ctx context.Context, e *Endpoint, req *Request, payload []byte) policy.Result {
	e.begin()
	defer e.end()
	caller := ctx
	var status int
	var resp *http.Response
	var connected bool
	var err error
	if e.direct.fits(req, payload) && !e.asksForBatches() {
		status, resp, connected, err = e.direct.roundTrip(ctx, e.Destination.Timeout, req, payload)
	} else {
		if e.Destination.Timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, e.Destination.Timeout)
			defer cancel()
		}
		resp, connected, err = e.roundTrip(ctx, req.HTTP(payload), payload)
	}
	if err != nil {
		return e.failed(caller, req, connected, err)
	}
	if resp == nil {
		return policy.ClassifyResponse(status, nil, "", e.Destination.Responses, time.Now())
	}
	defer func() { _ = resp.Body.Close() }()
	var excerpt string
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		excerpt = excerptOf(resp, e.Destination.Wire.Excerpts, func() *mask.Mask { return maskOf(e, req.Header()) })
	} else if e.offer != nil {
		e.learn(slices.Contains(resp.Header[webhook.AcceptPost], webhook.BatchType), "it does not say so in its answers")
	}
	if resp.Body != http.NoBody {
		// The status has decided; a body that breaks off changes nothing.
		_, _ = io.CopyN(io.Discard, resp.Body, maxDrain)
	}
	return policy.ClassifyResponse(resp.StatusCode, resp.Header, excerpt, e.Destination.Responses, time.Now())
}

// failed returns the result of a request that had no answer. caller is the context without the
// destination's timeout.
func (e *Endpoint) failed(caller context.Context, req *Request, connected bool, err error) policy.Result {
	if errors.Is(err, errNothingSent) {
		return policy.Result{Reason: policy.ReasonNetwork, Message: plain.Clip(err.Error())}
	}
	err = explain(err)
	v := policy.ClassifyError(err, connected)
	if v.Message = plain.Clip(maskOf(e, req.Header()).Hide(err.Error(), false)); v.Reason == policy.ReasonMalformed && e.Destination.Wire.Excerpts != ExcerptsText {
		v.Message = describeMalformed(err)
	}
	if v.Message == context.DeadlineExceeded.Error() && caller.Err() == nil {
		v.Message = fmt.Sprintf("no answer within %s", e.Destination.Timeout)
	}
	return v
}
