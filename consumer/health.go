package consumer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// reportHealth tells Config.Breaker what a request that it has let in has shown about its
// dependencies.
func (s *settings) reportHealth(rq *request, report Report) {
	if s.Breaker == nil || rq.entered.IsZero() {
		return
	}
	h, cause := healthOf(report, rq.ended, rq.took)
	if cause != nil {
		cause = s.shared.Loggable(cause)
	}
	s.Breaker.Leave(rq.pass, time.Now(), h, cause)
}

// impatience is the time before which a client that hangs up shows nothing about the dependencies.
// A client that waited longer met something that hangs, or a pool without a free connection.
const impatience = time.Second

// healthOf classifies the outcome of a request that took the given time. ended is the cause of its
// context's end, nil if it has not ended.
func healthOf(report Report, ended error, took time.Duration) (breaker.Health, error) {
	timedOut := errors.Is(ended, context.DeadlineExceeded) || errors.Is(report.Err, context.DeadlineExceeded)
	switch report.Result {
	case ResultProcessed, ResultIgnored:
		return breaker.Up, nil
	case ResultUnavailable:
		if !sqlstate.IsConflict(report.Err) && (ended == nil || took >= impatience) {
			return breaker.Down, report.Err
		}
	case ResultCommitFailed:
		if memory.IsDown(report.Err) {
			return breaker.Down, report.Err
		}
	case ResultFailed:
		switch {
		case sqlstate.IsConflict(report.Err):
		case timedOut:
			return breaker.Down, errors.New("the handler did not end in time")
		case ended != nil && took < impatience: // what the handler depends on may have been given up for the client's sake alone
		case report.Status == http.StatusBadGateway, report.Status == http.StatusServiceUnavailable, report.Status == http.StatusGatewayTimeout:
			return breaker.Down, errors.Join(fmt.Errorf("the handler answered %d", report.Status), report.Err)
		case 0 < report.Status && report.Status < http.StatusInternalServerError:
			return breaker.Up, nil
		}
	}
	return breaker.Unknown, nil
}

// spread lengthens a wait by up to a quarter, so that clients that are refused together do not
// return together.
func spread(wait time.Duration) time.Duration { return wait + rand.N(wait/4+1) }
