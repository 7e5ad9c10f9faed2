package memory_test

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// pruning forgets what one process of the role "prune-die", and those that come after it, are to
// forget.
func pruning(number string) consumer.PruneConfig {
	return consumer.PruneConfig{Receiver: "pruned-" + number, Retention: 90 * 24 * time.Hour, BatchPages: 1, Pause: time.Microsecond}
}

// pruneAndDie is a process that prunes, and kills itself at one of its operations.
func pruneAndDie(p *receivertest.Player) {
	f := receivertest.NewFate()
	pool, err := pgxpool.NewWithConfig(context.Background(), p.DoomedConfig(f))
	if err == nil {
		err = pool.Ping(context.Background())
	}
	if err != nil {
		panic(err)
	}
	f.Arm()
	if _, err := consumer.Prune(context.Background(), pool, pruning(os.Getenv(receivertest.DieNumber))); err != nil {
		panic(err)
	}
	f.AnswerAlive(p)
}

// A process that prunes is killed at every single operation on its connection. What it has
// forgotten by then is refused, what it has not is answered as the duplicate it is, nothing takes
// effect again; and the next one who prunes finishes.
func TestKilledWhilePruning(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, receivertest.Effect) // for its database
	day := 24 * time.Hour
	ages := map[string]time.Duration{"old": 100 * day, "aging": 90*day + time.Hour, "young": day}
	forgotten := 0
	prune := func(number int, operation string) (moment string) {
		n := strconv.Itoa(number)
		receiver := pruning(n).Receiver
		receive := receivertest.Must(consumer.Middleware(e.Pool, consumer.Config{Receiver: receiver, Secrets: []string{receivertest.SecretText}, Observe: receivertest.Unheard, Logger: slog.New(slog.DiscardHandler)}))(receivertest.Effect(e))
		bring := func(name string) (status int, replayed bool) {
			w := httptest.NewRecorder()
			receive.ServeHTTP(w, e.NewRequest(name+n, "{}", receivertest.Created(time.Now().Add(-ages[name]))))
			return w.Code, w.Header().Get(webhook.Replayed) != ""
		}
		for name, age := range ages {
			if status, replayed := bring(name); status != http.StatusCreated || replayed {
				t.Errorf("%s was answered %d", name, status)
			}
			e.MustExec(`UPDATE processed_events SET received_at = now() - $2::interval, processed_at = now() - $2::interval
				WHERE idempotency_key = $1`, name+n, age)
		}
		// An earlier run has announced that what is 95 days old may go.
		e.MustExec(`INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at, removable_before)
			VALUES ($1, 'outbox', now() - interval '95 days', now() - interval '1 day', now() - interval '95 days')`, receiver)

		doomed := receivertest.LaunchFor(t, "prune-die", e.DSN, receivertest.DieAt+"="+operation, receivertest.DieNumber+"="+n)
		doomed.Order("alive?")
		moment = doomed.WantLine(t)
		doomed.Kill()
		for name := range ages {
			status, replayed := bring(name)
			for tick := time.NewTicker(5 * time.Millisecond); status == http.StatusConflict || status == http.StatusServiceUnavailable; <-tick.C {
				status, replayed = bring(name) // until the server has noticed the death
			}
			switch {
			case status == http.StatusUnprocessableEntity && name == "old":
				forgotten++
			case status != http.StatusCreated || !replayed:
				t.Errorf("%s: %s was answered %d, replayed: %v", moment, name, status, replayed)
			}
		}
		if _, err := consumer.Prune(t.Context(), e.Pool, pruning(n)); err != nil {
			t.Errorf("%s: the next one to prune: %v", moment, err)
		}
		if status, _ := bring("old"); status != http.StatusUnprocessableEntity {
			t.Errorf("%s: what the next one has forgotten was answered %d", moment, status)
		}
		e.WantRows("old"+n, 1, 0)
		e.WantRows("young"+n, 1, 1)
		return moment
	}
	operations := receivertest.OperationsOf(t, prune(0, ""))
	seen := receivertest.Fates{}
	for i, operation := range operations {
		moment := prune(i+1, operation)
		if seen[moment]++; !strings.HasPrefix(moment, "dying ") {
			t.Errorf("nothing died %s", operation)
		}
	}
	seen.Want(t, "dying", "before writing the pruning", "after writing the pruning", "after the reply to the pruning")
	t.Logf("%d deaths, each at another operation; after %d of them the event was forgotten", len(operations), forgotten-1)
}
