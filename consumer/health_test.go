package consumer

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
)

func TestHealthOfARequest(t *testing.T) {
	t.Parallel()
	state := func(code string) error { return &pgconn.PgError{Code: code} }
	failed := func(status int, err error) Report { return Report{Result: ResultFailed, Status: status, Err: err} }
	for name, c := range map[string]struct {
		report Report
		ended  error
		took   time.Duration
		want   breaker.Health
	}{
		"committed":                       {report: Report{Result: ResultProcessed}, want: breaker.Up},
		"committed after the deadline":    {report: Report{Result: ResultProcessed}, ended: context.DeadlineExceeded, want: breaker.Up},
		"ignored":                         {report: Report{Result: ResultIgnored}, want: breaker.Up},
		"duplicate":                       {report: Report{Result: ResultDuplicate}},
		"in flight":                       {report: Report{Result: ResultInFlight}},
		"no database":                     {report: Report{Result: ResultUnavailable, Err: errors.New("refused")}, want: breaker.Down},
		"client gone":                     {report: Report{Result: ResultUnavailable, Err: context.Canceled}, ended: context.Canceled},
		"client gone after long":          {report: Report{Result: ResultUnavailable, Err: context.Canceled}, ended: context.Canceled, took: time.Second, want: breaker.Down},
		"conflict at the start":           {report: Report{Result: ResultUnavailable, Err: state("40001")}},
		"refused by the handler":          {report: failed(404, nil), want: breaker.Up},
		"500":                             {report: failed(500, nil)},
		"panic":                           {report: failed(500, &verdict.Panic{Cause: 1})},
		"aborted":                         {report: failed(0, http.ErrAbortHandler)},
		"502":                             {report: failed(502, nil), want: breaker.Down},
		"503":                             {report: failed(503, nil), want: breaker.Down},
		"504":                             {report: failed(504, nil), want: breaker.Down},
		"503 without the client":          {report: failed(503, nil), ended: context.Canceled},
		"503 after the client left late":  {report: failed(503, nil), ended: context.Canceled, took: time.Second, want: breaker.Down},
		"503 for a conflict":              {report: failed(503, state("40P01"))},
		"500 at the deadline":             {report: failed(500, nil), ended: context.DeadlineExceeded, want: breaker.Down},
		"500 without the client":          {report: failed(500, nil), ended: context.Canceled},
		"commit: constraint":              {report: Report{Result: ResultCommitFailed, Err: state("23503")}},
		"commit: conflict":                {report: Report{Result: ResultCommitFailed, Err: state("40001")}},
		"commit: disk full":               {report: Report{Result: ResultCommitFailed, Err: state("53100")}, want: breaker.Down},
		"commit: shutdown":                {report: Report{Result: ResultCommitFailed, Err: state("57P01")}, want: breaker.Down},
		"commit: statement timeout":       {report: Report{Result: ResultCommitFailed, Err: state("57014")}},
		"commit: connection lost":         {report: Report{Result: ResultCommitFailed, Err: errors.New("EOF")}, want: breaker.Down},
		"commit: the handler's own fault": {report: Report{Result: ResultCommitFailed, Err: memory.ErrAborted}},
		"commit: ended by the handler":    {report: Report{Result: ResultCommitFailed, Err: memory.ErrEnded}},
		"commit: a name in its place":     {report: Report{Result: ResultCommitFailed, Err: memory.ErrNotCommit}},
	} {
		got, cause := healthOf(c.report, c.ended, c.took)
		if got != c.want || (cause != nil) != (got == breaker.Down) {
			t.Errorf("%s: %v because of %v, want %v", name, got, cause, c.want)
		}
	}
}

func TestErrorsThatTellOfADependency(t *testing.T) {
	t.Parallel()
	down := errors.New("bank is down")
	for name, c := range map[string]struct {
		err  error
		down bool
	}{
		"none": {nil, false}, "any": {down, false}, "marked": {DependencyDown(down), true}, "later": {RetryAfter(down, time.Second), true},
		"permanent": {Permanent(down), false}, "outermost": {Permanent(DependencyDown(down)), false}, "ignored": {Ignore("x"), false},
	} {
		if got := verdict.Of(c.err); got.Down != c.down {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if err := DependencyDown(down); !errors.Is(err, down) || err.Error() != down.Error() || DependencyDown(nil) != nil {
		t.Errorf("error %v", err)
	}
}
