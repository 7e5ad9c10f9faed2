package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
)

// Bounds of what a receiver can make the relay read, in bytes.
const (
	maxResponseHeader = 64 << 10
	maxDrain          = 64 << 10 // of a body, so that the connection can be used again
	maxExcerpt        = 1 << 10  // of a body, kept as evidence of a refusal
)

// crashLoop is after how many claims lost to a dead relay, with no settle between, a delivery is suspected of killing
// its relays.
const crashLoop = 20

// send empties a lane until there is nothing left for this sender.
func (r *Relay) send(l *lane) {
	for {
		d, ok := l.next()
		if !ok {
			return
		}
		started := time.Now()
		v := r.attempt(l, &d)
		r.settle(l, newSettlement(d, v, l.destination.Retry, started, time.Since(started), jitterFraction()))
	}
}

// giveBackUnsent empties the lanes' queues at a stop. The senders would do it too, but only when their POSTs have ended,
// and until then no other relay could take what waits behind them.
func (r *Relay) giveBackUnsent() {
	for _, l := range r.lanes {
		for _, d := range l.unsent() {
			v := verdict{outcome: Hold, reason: ReasonShutdown}
			r.settle(l, newSettlement(d, v, l.destination.Retry, time.Now(), 0, 0))
		}
	}
}

// attempt makes the one POST of a claim, unless something speaks against it.
func (r *Relay) attempt(l *lane, d *delivery) (v verdict) {
	// One delivery that trips a defect must not take the relay, and all others, with it.
	defer func() {
		if defect := recover(); defect != nil {
			v = verdict{outcome: Retry, reason: ReasonPanic, message: clip(fmt.Sprint("panic: ", defect)), posted: true}
		}
	}()
	if r.taking.Err() != nil {
		return verdict{outcome: Hold, reason: ReasonShutdown}
	}
	if l.paused() {
		return verdict{outcome: Hold, reason: ReasonPaused}
	}
	if time.Until(d.leaseEnds) < l.destination.Timeout+sendMargin {
		return verdict{outcome: Hold, reason: ReasonLease}
	}
	if d.rescues >= crashLoop {
		return verdict{outcome: Fail, reason: ReasonCrashLoop, message: fmt.Sprintf("%d relays died while holding this delivery", d.rescues)}
	}
	if d.event.key == nil {
		return verdict{outcome: Fail, reason: ReasonEventMissing, message: "the event is gone from outbox"}
	}
	if d.event.payload == nil {
		payload, err := r.store.payload(r.doing, d.eventID)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return verdict{outcome: Fail, reason: ReasonEventMissing, message: "the event is gone from outbox"}
		case err != nil:
			r.databaseError("load payload", err)
			return verdict{outcome: Hold, reason: ReasonDatabase}
		}
		d.event.payload = payload
	}
	req, err := newRequest(l.endpoint, d, time.Now())
	if err != nil {
		return refuse(err)
	}
	ctx, cancel := context.WithTimeout(r.doing, l.destination.Timeout)
	defer cancel()
	v = post(l.endpoint, req.WithContext(ctx))
	if v.outcome == Fail && v.reason == ReasonGone && !l.pause() {
		v.outcome = Retry // one has to tell; the others in flight wait with the rest until the destination is resumed
	}
	return v
}

// post makes exactly one request. It is a round trip of the transport, not a call of an http.Client, which would follow
// redirects: with a GET whose 200 looks like success, or with the body, key and signature to another host.
func post(e *endpoint, req *http.Request) verdict {
	req, sent := watch(req)
	resp, err := e.transport.RoundTrip(req)
	if err != nil {
		if req.Context().Err() == nil && sent.nothingSent() {
			return verdict{outcome: Hold, reason: ReasonNetwork, message: clip(err.Error())}
		}
		return judgeError(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusSwitchingProtocols {
		// The transport has handed the connection over, and with it the deadline: reading could hang for ever.
		return judgeResponse(resp.StatusCode, resp.Header, "", e.destination.Responses, time.Now())
	}
	var excerpt []byte
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		excerpt, _ = io.ReadAll(io.LimitReader(resp.Body, maxExcerpt))
	}
	// The status has decided; a body that breaks off changes nothing.
	_, _ = io.CopyN(io.Discard, resp.Body, maxDrain)
	return judgeResponse(resp.StatusCode, resp.Header, string(excerpt), e.destination.Responses, time.Now())
}
