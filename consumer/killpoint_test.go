package consumer_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// receiveAndDie is a receiver that kills itself at one of its operations.
func receiveAndDie(p *player) {
	f := newFate()
	cfg := p.doomedConfig(f)
	var middleware func(http.Handler) http.Handler
	flavour := flavours[0]
	switch os.Getenv(dieFlavour) {
	case flavours[0].name:
		pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
		if err == nil {
			err = pool.Ping(context.Background())
		}
		if err != nil {
			panic(err)
		}
		middleware = consumer.Must(consumer.Middleware(pool, consumer.Config{Receiver: "test", Secrets: []string{secretText}}))
	default:
		flavour = flavours[1]
		db := stdlib.OpenDB(*cfg.ConnConfig)
		if err := db.Ping(); err != nil {
			panic(err)
		}
		middleware = consumer.Must(sqlconsumer.Middleware(db, consumer.Config{Receiver: "test", Secrets: []string{secretText}}))
	}
	go f.answerAlive(p)
	listener, url := p.listen()
	fmt.Println(url)
	panic(http.Serve(&doomedListener{Listener: listener, fate: f}, middleware(effect(&env{flavour: flavour}))))
}

// fates are the moments at which processes died or froze, by what they wrote then.
type fates map[string]int

// want asserts that a process met its fate at each of the moments. A test that has failed was given up half-way.
func (f fates) want(t *testing.T, fate string, moments ...string) {
	t.Helper()
	if t.Failed() {
		return
	}
	for _, moment := range moments {
		if f[fate+" "+moment] == 0 {
			t.Errorf("nothing was %s %s, only %q", fate, moment, slices.Sorted(maps.Keys(f)))
		}
	}
}

// receiverMoments are those at which a receiver must have met its fate, for a test of all its operations to be one.
func receiverMoments() []string {
	return []string{
		"before writing the admission", "after the reply to the admission",
		"before writing the effect", "after the reply to the effect",
		"before writing COMMIT", "after writing COMMIT", "after the reply to COMMIT",
		"before writing the answer", "half-way through the answer", "after writing the answer",
	}
}

// unheard lets no report pile up: a sender that comes again until a key is free makes any number of them.
func unheard(context.Context, consumer.Report) {}

// operationsOf returns the operations that a process has seen which met no fate.
func operationsOf(t *testing.T, line string) []string {
	t.Helper()
	list, ok := strings.CutPrefix(line, alive)
	if !ok {
		t.Fatalf("the process that has no fate said %q", line)
	}
	return strings.Split(list, separator)
}

// eachOperation starts a receiver for every operation that one sees while it processes an event; the receiver is to meet
// its fate there.
func eachOperation(t *testing.T, e *env, f flavour, meet func(p *process, url, key string), settings ...string) {
	start := func(operation string) (p *process, url string) {
		p = launchFor(t, "die", e.dsn, append(settings, dieFlavour+"="+f.name, dieAt+"="+operation)...)
		return p, p.wantLine(t)
	}
	unharmed, url := start("")
	wantFirst(t, e.do(e.newRequestTo(url, "k", "{}")), 201, `{"done":"k"}`)
	unharmed.order("alive?")
	for i, operation := range operationsOf(t, unharmed.wantLine(t)) {
		p, url := start(operation)
		meet(p, url, "k"+strconv.Itoa(i))
		p.kill()
	}
}

// A receiver is killed at every single operation on its connections, one after the other. Whatever the client has heard,
// it comes again as a relay does, and finds the effect made, or makes it: once.
func TestKilledAtEveryOperation(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{Observe: unheard}, effect) // the receiver that comes after the crash
		seen, deaths, replayed := fates{}, 0, 0
		eachOperation(t, e, f, func(doomed *process, url, key string) {
			first, err := e.try(e.newRequestTo(url, key, "{}"))
			if err == nil {
				wantFirst(t, first, 201, `{"done":"`+key+`"}`)
			}
			doomed.order("alive?")
			moment := doomed.wantLine(t)
			if seen[moment]++; strings.HasPrefix(moment, "dying ") {
				deaths++
				if <-doomed.ended; !doomed.killed() {
					t.Errorf("%s: the process ended with %v", moment, doomed.cmd.ProcessState)
				}
			}
			again := e.post(key, "{}")
			for tick := time.NewTicker(5 * time.Millisecond); again.status == http.StatusConflict; <-tick.C {
				again = e.post(key, "{}") // until the server has noticed the death
			}
			switch {
			case again.header.Get(webhook.Replayed) != "":
				wantReplayed(t, again, 201, "")
				replayed++
			case err == nil:
				t.Errorf("%s: the client was answered, and the handler ran again", moment)
			default:
				wantFirst(t, again, 201, `{"done":"`+key+`"}`)
			}
			e.wantRows(key, 1, 1)
		})
		seen.want(t, "dying", receiverMoments()...)
		t.Logf("%d deaths, each at another operation; after %d of them the effect was there", deaths, replayed)
	})
}

// thaw lets a frozen process go on until it has done something. Once is not enough: it says that it stops before it does.
func thaw[T any](p *process, done <-chan T) T {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		p.signal(syscall.SIGCONT)
		select {
		case result := <-done:
			return result
		case <-tick.C:
		}
	}
}

// answersOnce reports whether an answer is the handler's, or that of a duplicate.
func answersOnce(got response, key string) bool {
	want := `{"done":"` + key + `"}`
	if got.header.Get(webhook.Replayed) != "" {
		want = ""
	}
	return got.status == 201 && got.body == want
}

// A receiver is stopped at every single operation on its connections, and goes on when the sender has come again to
// another process. The effect is made once, by either process, and no request waits for the process that does not move.
func TestFrozenAtEveryOperation(t *testing.T) {
	testsize.Long(t)
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{Observe: unheard}, effect) // the other process
		seen, frozen, busy := fates{}, 0, 0
		eachOperation(t, e, f, func(p *process, url, key string) {
			request, answered := e.newRequestTo(url, key, "{}"), make(chan response, 1)
			go func() {
				got, err := e.try(request)
				if err != nil {
					t.Error(err)
				}
				p.order("alive?")
				answered <- got
			}()
			moment := p.wantLine(t)
			if seen[moment]++; strings.HasPrefix(moment, "frozen ") {
				frozen++
			}
			switch other := e.post(key, "{}"); other.status { // while the process stands still
			case http.StatusConflict:
				wantProblem(t, other, 409, "in-flight")
				busy++
			default:
				if !answersOnce(other, key) {
					t.Errorf("%s: the other process answered %d %s", moment, other.status, other.body)
				}
			}
			if first := thaw(p, answered); !answersOnce(first, key) {
				t.Errorf("%s: it answered %d %s", moment, first.status, first.body)
			}
			e.wantRows(key, 1, 1)
		}, freezeOnly+"=yes")
		seen.want(t, "frozen", receiverMoments()...)
		t.Logf("frozen at %d operations, in %d of them holding the key", frozen, busy)
	})
}
