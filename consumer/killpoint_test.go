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
		middleware = consumer.Middleware(pool, consumer.Config{Secrets: []string{secretText}})
	default:
		flavour = flavours[1]
		db := stdlib.OpenDB(*cfg.ConnConfig)
		if err := db.Ping(); err != nil {
			panic(err)
		}
		middleware = consumer.MiddlewareSQL(db, consumer.Config{Secrets: []string{secretText}})
	}
	go f.answerAlive(p)
	listener, url := p.listen()
	fmt.Println(url)
	panic(http.Serve(&doomedListener{Listener: listener, fate: f}, middleware(effect(&env{flavour: flavour}))))
}

// deaths are the moments at which processes died or froze, by what they wrote last.
type deaths map[string]int

// want asserts that a process met its fate at each of the moments.
func (d deaths) want(t *testing.T, fate string, moments ...string) {
	t.Helper()
	for _, moment := range moments {
		if d[fate+" "+moment] == 0 {
			t.Errorf("nothing was %s %s, only %q", fate, moment, slices.Sorted(maps.Keys(d)))
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

// fateOf waits for the end of a process that may be doomed, and reports when it died; false if it lives.
func fateOf(t *testing.T, p *process) (moment string, died bool) {
	t.Helper()
	p.order("alive?")
	moment = p.wantLine(t)
	died = strings.HasPrefix(moment, "dying ")
	if died {
		<-p.ended
		if !p.killed() {
			t.Fatalf("the process ended with %v", p.cmd.ProcessState)
		}
	}
	p.kill()
	return moment, died
}

// A receiver is killed at every single operation on its connections, one after the other. Whatever the client has heard,
// it comes again as a relay does, and finds the effect made, or makes it: once.
func TestKilledAtEveryOperation(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect) // the receiver that comes after the crash
		seen, replayed := deaths{}, 0
		for n, alive := 1, false; !alive; n++ {
			doomed := launchFor(t, "die", e.dsn, dieAt+"="+strconv.Itoa(n), dieFlavour+"="+f.name)
			key := "k" + strconv.Itoa(n)
			first, err := e.try(e.newRequestTo(doomed.wantLine(t), key, "{}"))
			if err == nil {
				wantFirst(t, first, 201, `{"done":"`+key+`"}`)
			}
			moment, died := fateOf(t, doomed)
			if alive = !died; alive {
				if err != nil {
					t.Errorf("%s, and gave no answer: %v", moment, err)
				}
				t.Logf("%d deaths at as many operations, %d of them after the commit; then %s", n-1, replayed, moment)
				continue
			}
			seen[moment]++
			again := e.post(key, "{}")
			for again.status == http.StatusConflict { // until the server has noticed the death
				again = e.post(key, "{}")
			}
			switch {
			case again.header.Get(consumer.HeaderReplayed) != "":
				wantReplayed(t, again, 201, `{"done":"`+key+`"}`)
				replayed++
			case err == nil:
				t.Errorf("%s: the client was answered, and the handler ran again", moment)
			default:
				wantFirst(t, again, 201, `{"done":"`+key+`"}`)
			}
			e.wantRows(key, 1, 1)
		}
		seen.want(t, "dying", receiverMoments()...)
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

// A receiver is stopped at every single operation on its connections, and goes on when the sender has come again to
// another process. Whoever makes the effect, it is made once, and nobody waits for the one that does not move.
func TestFrozenAtEveryOperation(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect) // the other process
		seen, busy := deaths{}, 0
		for n, alive := 1, false; !alive; n++ {
			frozen := launchFor(t, "die", e.dsn, dieAt+"="+strconv.Itoa(n), dieFlavour+"="+f.name, freezeOnly+"=yes")
			key := "k" + strconv.Itoa(n)
			request, answered := e.newRequestTo(frozen.wantLine(t), key, "{}"), make(chan response, 1)
			go func() {
				got, err := e.try(request)
				if err != nil {
					t.Error(err)
				}
				answered <- got
			}()
			first, early := response{}, false
			moment := ""
			select {
			case moment = <-frozen.lines:
			case first = <-answered:
				early = true
				frozen.order("alive?")
				moment = frozen.wantLine(t)
			}
			if alive = !strings.HasPrefix(moment, "frozen "); !alive {
				seen[moment]++
			}
			switch other := e.post(key, "{}"); other.status { // while the process stands still
			case http.StatusConflict:
				wantProblem(t, other, 409, "in-flight")
				busy++
			default:
				if other.status != 201 || other.body != `{"done":"`+key+`"}` {
					t.Errorf("%s: the other process answered %d %s", moment, other.status, other.body)
				}
			}
			if !early {
				first = thaw(frozen, answered)
			}
			if first.status != 201 || first.body != `{"done":"`+key+`"}` {
				t.Errorf("%s: it answered %d %s", moment, first.status, first.body)
			}
			e.wantRows(key, 1, 1)
			frozen.kill()
			if alive {
				t.Logf("frozen at %d operations, in %d of them holding the key; then %s", n-1, busy, moment)
			}
		}
		seen.want(t, "frozen", receiverMoments()...)
	})
}
