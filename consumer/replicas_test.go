package consumer_test

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// holdHeader makes the handler of the role "receive" wait for an order.
const holdHeader = "X-Test-Hold"

// receive is an ordinary receiver, whose handler says that it runs.
func receive(p *player) {
	run := effect(&env{flavour: flavours[0]})
	middleware := consumer.Must(consumer.Middleware(p.pool(), consumer.Config{Receiver: "test", Secrets: []string{secretText}}))
	p.serve(middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Println("running")
		if r.Header.Get(holdHeader) != "" {
			<-p.orders
		}
		run(w, r)
	})))
}

// replicas are two processes of one receiver.
type replicas struct {
	*env
	t         *testing.T
	processes [2]*process
	urls      [2]string
}

const crowd = 50 // requests at once

func newReplicas(t *testing.T) *replicas {
	e := newEnv(t, flavours[0], consumer.Config{}, effect) // for its database and client
	r := &replicas{env: e, t: t}
	for i := range r.processes {
		r.processes[i] = launchFor(t, "receive", e.dsn)
		r.urls[i] = r.processes[i].wantLine(t)
	}
	return r
}

// timed is an answer and how long it took.
type timed struct {
	response
	took time.Duration
}

// postAtOnce sends the same event to both processes, half of the requests to each.
func (r *replicas) postAtOnce(key string, change ...func(http.Header)) <-chan timed {
	answers, start := make(chan timed, crowd), make(chan struct{})
	for i := range crowd {
		request := r.newRequestTo(r.urls[i%2], key, "{}", change...)
		go func() {
			<-start
			begun := time.Now()
			got, err := r.try(request)
			if err != nil {
				r.t.Error(err)
			}
			answers <- timed{got, time.Since(begun)}
		}()
	}
	close(start)
	return answers
}

// running returns the process in which the handler has begun.
func (r *replicas) running() *process {
	r.t.Helper()
	select {
	case <-r.processes[0].lines:
		return r.processes[0]
	case <-r.processes[1].lines:
		return r.processes[1]
	case <-r.t.Context().Done():
		r.t.Fatal("no handler runs")
		return nil
	}
}

// waits counts sessions of this database that are seen waiting for a row or for an advisory lock, until stop is closed.
func (r *replicas) waits(stop <-chan struct{}) <-chan int {
	seen := make(chan int, 1)
	go func() {
		total := 0
		defer func() { seen <- total }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			var n int
			err := r.pool.QueryRow(context.Background(), `SELECT count(*) FROM pg_stat_activity
				WHERE datname = current_database() AND wait_event_type = 'Lock'
				  AND wait_event IN ('advisory', 'transactionid', 'tuple')`).Scan(&n)
			if err != nil {
				r.t.Error(err)
				return
			}
			total += n
		}
	}()
	return seen
}

// tally counts the answers by status; the refusals must say when to come again.
func (r *replicas) tally(answers <-chan timed) map[string]int {
	r.t.Helper()
	tally := map[string]int{}
	for range crowd {
		got := <-answers
		tally[strconv.Itoa(got.status)+got.header.Get(webhook.Replayed)]++
		if got.status == http.StatusConflict {
			wantProblem(r.t, got.response, 409, "in-flight")
		}
	}
	return tally
}

// While one of two processes works an event, all others who bring it are told so, and none of them waits: their answers
// are there before the handler goes on.
func TestFiftyAtOnceOnTwoProcesses(t *testing.T) {
	t.Parallel()
	r := newReplicas(t)
	sampled := make(chan struct{})
	waits := r.waits(sampled)
	answers := r.postAtOnce("k", with(holdHeader, "yes"))
	handler := r.running()

	longest := time.Duration(0)
	for range crowd - 1 {
		got := <-answers
		wantProblem(t, got.response, 409, "in-flight")
		longest = max(longest, got.took)
	}
	close(sampled)
	if n := <-waits; n > 0 {
		t.Errorf("sessions were seen waiting for a lock %d times", n)
	}
	handler.order("go on")
	wantFirst(t, (<-answers).response, 201, `{"done":"k"}`)
	if tally := r.tally(r.postAtOnce("k", with(holdHeader, "yes"))); tally["201true"] != crowd {
		t.Errorf("duplicates after the commit were answered %v, want %d stored responses", tally, crowd)
	}
	r.wantRows("k", 1, 1)
	t.Logf("%d at once on two processes: the longest of %d refusals took %s", crowd, crowd-1, longest.Round(100*time.Microsecond))

	tally := r.tally(r.postAtOnce("free"))
	if tally["201"] != 1 || tally["201"]+tally["201true"]+tally["409"] != crowd {
		t.Errorf("a handler that is not held up: answers %v", tally)
	}
	r.wantRows("free", 1, 1)
}

// An INSERT of the key without the advisory lock is met at the unique index, where the wait is bounded: all are
// refused while it still holds the key.
func TestFiftyAtOnceBehindAPlainInsert(t *testing.T) {
	t.Parallel()
	r := newReplicas(t)
	release := r.hold(func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('test', 'outbox', 'k', 'succeeded')")
		return err
	})
	longest := time.Duration(0)
	for answers, n := r.postAtOnce("k"), 0; n < crowd; n++ {
		got := <-answers
		wantProblem(t, got.response, 409, "in-flight")
		longest = max(longest, got.took)
	}
	release()
	if tally := r.tally(r.postAtOnce("k")); tally["200true"] != crowd {
		t.Errorf("after the commit the answers are %v, want %d times 200", tally, crowd)
	}
	r.wantRows("k", 0, 1)
	t.Logf("%d at once behind an insert without the lock: the longest refusal took %s",
		crowd, longest.Round(100*time.Microsecond))
}
