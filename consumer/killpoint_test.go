package consumer_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// receiveAndDie is a receiver that kills itself at one of its operations.
func receiveAndDie(p *receivertest.Player) {
	f := receivertest.NewFate()
	cfg := p.DoomedConfig(f)
	var middleware func(http.Handler) http.Handler
	flavour := receivertest.PGX()
	switch os.Getenv(receivertest.DieFlavour) {
	case receivertest.PGX().Name:
		pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
		if err == nil {
			err = pool.Ping(context.Background())
		}
		if err != nil {
			panic(err)
		}
		middleware = receivertest.Must(consumer.Middleware(pool, consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}}))
	default:
		flavour = receivertest.SQL()
		db := stdlib.OpenDB(*cfg.ConnConfig)
		if err := db.Ping(); err != nil {
			panic(err)
		}
		middleware = receivertest.Must(sqlconsumer.Middleware(db, consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}}))
	}
	go f.AnswerAlive(p)
	listener, url := p.Listen()
	fmt.Println(url)
	panic(http.Serve(&receivertest.DoomedListener{Listener: listener, Fate: f}, middleware(receivertest.Effect(&receivertest.Env{Flavour: flavour}))))
}

// receiverMoments are those at which a receiver must have met its fate, for a test of all its
// operations to be one.
func receiverMoments() []string {
	return []string{
		"before writing the admission", "after the reply to the admission",
		"before writing the effect", "after the reply to the effect",
		"before writing COMMIT", "after writing COMMIT", "after the reply to COMMIT",
		"before writing the answer", "half-way through the answer", "after writing the answer",
	}
}

// eachOperation starts a receiver for every operation that one sees while it processes an event;
// the receiver is to meet its fate there.
func eachOperation(t *testing.T, e *receivertest.Env, f receivertest.Flavour, meet func(p *receivertest.Process, url, key string), settings ...string) {
	start := func(operation string) (p *receivertest.Process, url string) {
		p = receivertest.LaunchFor(t, "die", e.DSN, append(settings, receivertest.DieFlavour+"="+f.Name, receivertest.DieAt+"="+operation)...)
		return p, p.WantLine(t)
	}
	unharmed, url := start("")
	receivertest.WantFirst(t, e.Do(e.NewRequestTo(url, "k", "{}")), 201, `{"done":"k"}`)
	unharmed.Order("alive?")
	for i, operation := range receivertest.OperationsOf(t, unharmed.WantLine(t)) {
		p, url := start(operation)
		meet(p, url, "k"+strconv.Itoa(i))
		p.Kill()
	}
}

// A receiver is killed at every single operation on its connections, one after the other. Whatever
// the client has heard, it comes again as a relay does, and finds the effect made, or makes it:
// once.
func TestKilledAtEveryOperation(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{Observe: receivertest.Unheard}, receivertest.Effect) // the receiver that comes after the crash
		seen, deaths, replayed := receivertest.Fates{}, 0, 0
		eachOperation(t, e, f, func(doomed *receivertest.Process, url, key string) {
			first, err := e.Try(e.NewRequestTo(url, key, "{}"))
			if err == nil {
				receivertest.WantFirst(t, first, 201, `{"done":"`+key+`"}`)
			}
			doomed.Order("alive?")
			moment := doomed.WantLine(t)
			if seen[moment]++; strings.HasPrefix(moment, "dying ") {
				deaths++
				if <-doomed.Ended; !doomed.Killed() {
					t.Errorf("%s: the process ended with %v", moment, doomed.Cmd.ProcessState)
				}
			}
			again := e.Post(key, "{}")
			for tick := time.NewTicker(5 * time.Millisecond); again.Status == http.StatusConflict; <-tick.C {
				again = e.Post(key, "{}") // until the server has noticed the death
			}
			switch {
			case again.Header.Get(webhook.Replayed) != "":
				receivertest.WantReplayed(t, again, 201, "")
				replayed++
			case err == nil:
				t.Errorf("%s: the client was answered, and the handler ran again", moment)
			default:
				receivertest.WantFirst(t, again, 201, `{"done":"`+key+`"}`)
			}
			e.WantRows(key, 1, 1)
		})
		seen.Want(t, "dying", receiverMoments()...)
		t.Logf("%d deaths, each at another operation; after %d of them the effect was there", deaths, replayed)
	})
}

// answersOnce reports whether an answer is the handler's, or that of a duplicate.
func answersOnce(got receivertest.Response, key string) bool {
	want := `{"done":"` + key + `"}`
	if got.Header.Get(webhook.Replayed) != "" {
		want = ""
	}
	return got.Status == 201 && got.Body == want
}

// A receiver is stopped at every single operation on its connections, and continues when the sender
// has come again to another process. The effect is made once, by either process, and no request
// waits for the process that does not move.
func TestFrozenAtEveryOperation(t *testing.T) {
	testsize.Long(t)
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{Observe: receivertest.Unheard}, receivertest.Effect) // the other process
		seen, frozen, busy := receivertest.Fates{}, 0, 0
		eachOperation(t, e, f, func(p *receivertest.Process, url, key string) {
			request, answered := e.NewRequestTo(url, key, "{}"), make(chan receivertest.Response, 1)
			go func() {
				got, err := e.Try(request)
				if err != nil {
					t.Error(err)
				}
				p.Order("alive?")
				answered <- got
			}()
			moment := p.WantLine(t)
			if seen[moment]++; strings.HasPrefix(moment, "frozen ") {
				frozen++
			}
			switch other := e.Post(key, "{}"); other.Status { // while the process stands still
			case http.StatusConflict:
				receivertest.WantProblem(t, other, 409, "in-flight")
				busy++
			default:
				if !answersOnce(other, key) {
					t.Errorf("%s: the other process answered %d %s", moment, other.Status, other.Body)
				}
			}
			p.Thaw()
			if first := <-answered; !answersOnce(first, key) {
				t.Errorf("%s: it answered %d %s", moment, first.Status, first.Body)
			}
			e.WantRows(key, 1, 1)
		}, receivertest.FreezeOnly+"=yes")
		seen.Want(t, "frozen", receiverMoments()...)
		t.Logf("frozen at %d operations, in %d of them holding the key", frozen, busy)
	})
}
