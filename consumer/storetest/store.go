package storetest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/consumer/store"
)

const (
	// short is a lease whose end a test waits for. It demands nothing of what happens before.
	short = 300 * time.Millisecond
	// hour is a lease that no test sees the end of: what becomes free under it was released.
	hour = time.Hour
	// patience ends a test that would hang. No assertion depends on it.
	patience = 30 * time.Second
)

// events are those of one test.
type events struct {
	*testing.T
	memory   Memory
	store    store.Store
	survives bool // what is known survives a restart
}

// claim is a new request's claim to the event key.
func claim(key string) store.Claim {
	return store.Claim{Receiver: "test", Source: "outbox", IdempotencyKey: key, Token: rand.Text()}
}

// known is what a receiver remembers of a claimed event.
func known(c store.Claim, status int) store.Known {
	return store.Known{Status: status, Hash: fmt.Sprintf("%x", sha256.Sum256([]byte(c.IdempotencyKey))), Destination: "shop"}
}

func (e *events) acquire(c store.Claim, lease time.Duration) store.Acquired {
	e.Helper()
	got, err := e.store.Acquire(e.Context(), c, lease)
	if err != nil {
		e.Fatalf("acquire: %v", err)
	}
	if got.Claimed && got.Known != nil {
		e.Error("an event is claimed and known at once")
	}
	return got
}

// wantClaimed asserts whether this claim gets the event. If not, another one holds it.
func (e *events) wantClaimed(c store.Claim, lease time.Duration, want bool) {
	e.Helper()
	if got := e.acquire(c, lease); got.Claimed != want || got.Known != nil {
		e.Errorf("acquired %+v, want claimed %v", got, want)
	}
}

func (e *events) complete(c store.Claim, status int, ttl time.Duration) {
	e.Helper()
	if err := e.store.Complete(e.Context(), c, known(c, status), ttl); err != nil {
		e.Fatalf("complete: %v", err)
	}
}

func (e *events) wantLeaseLost(c store.Claim) {
	e.Helper()
	if err := e.store.Complete(e.Context(), c, known(c, 299), hour); !errors.Is(err, store.ErrLeaseLost) {
		e.Errorf("complete: %v, want ErrLeaseLost", err)
	}
}

func (e *events) release(c store.Claim) {
	e.Helper()
	if err := e.store.Release(e.Context(), c); err != nil {
		e.Fatalf("release: %v", err)
	}
}

// wantKnown asserts what a new request, or another claim of the same one, finds.
func (e *events) wantKnown(c store.Claim, status int) {
	e.Helper()
	if got, want := e.acquire(c, hour).Known, known(c, status); got == nil || *got != want {
		e.Errorf("known %+v, want %+v", got, want)
	}
}

// await claims the event until it is free.
func (e *events) await(c store.Claim, lease time.Duration) {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.Context(), patience)
	defer cancel()
	for ctx.Err() == nil {
		if e.acquire(c, lease).Claimed {
			return
		}
	}
	e.Fatal("the event does not become free")
}

func oneClaim(e *events) {
	one, two := claim("k"), claim("k")
	e.wantClaimed(one, hour, true)
	e.wantClaimed(two, hour, false)
	e.release(one)
	e.wantClaimed(two, hour, true)
	e.wantClaimed(one, hour, false)
	e.wantClaimed(claim("another"), hour, true)
}

func oneOfFifty(e *events) {
	var asking sync.WaitGroup
	stores := []store.Store{e.store, e.memory.Open()}
	start, claimed := make(chan struct{}), make(chan store.Claim, 50)
	for i := range cap(claimed) {
		asking.Go(func() {
			c := claim("k")
			<-start
			got, err := stores[i%2].Acquire(e.Context(), c, hour)
			if err != nil {
				e.Error(err)
			}
			if got.Claimed {
				claimed <- c
			}
		})
	}
	close(start)
	asking.Wait()
	if len(claimed) != 1 {
		e.Fatalf("%d claims hold the event", len(claimed))
	}
	e.complete(<-claimed, 200, hour)
}

// Clients of databases repeat what was not answered. The first time may have worked.
func repeatedCommands(e *events) {
	one, two := claim("k"), claim("k")
	e.wantClaimed(one, hour, true)
	e.wantClaimed(one, hour, true)
	e.release(one)
	e.release(one)
	e.wantClaimed(two, hour, true)
	e.release(one)
	e.wantClaimed(claim("k"), hour, false)
	const want = 201
	e.complete(two, want, hour)
	e.complete(two, want, hour)
	e.wantKnown(two, want)
}

// Nothing but time takes back what is known.
func knownStays(e *events) {
	one := claim("k")
	const want = 201
	e.wantClaimed(one, short, true)
	e.complete(one, want, hour)
	e.release(one)
	other := claim("k")
	e.wantKnown(other, want)
	e.release(other)
	e.wantLeaseLost(other)
	e.wantKnown(one, want)
}

func othersHaveNoSay(e *events) {
	one, two := claim("k"), claim("k")
	e.wantClaimed(one, hour, true)
	e.release(two)
	e.wantLeaseLost(two)
	e.wantClaimed(two, hour, false)
	e.complete(one, 204, hour)
	e.wantKnown(two, 204)
}

func leaseEnds(e *events) {
	one, two := claim("k"), claim("k")
	e.wantClaimed(one, short, true)
	e.await(two, hour)
	e.release(one)
	e.wantLeaseLost(one)
	e.wantClaimed(one, hour, false)
	e.complete(two, 200, hour)
	e.wantLeaseLost(one)
	e.wantKnown(one, 200)
}

func leaseEndsAlone(e *events) {
	one, probe := claim("k"), claim("k")
	e.wantClaimed(one, short, true)
	e.await(probe, short)
	e.await(claim("k"), short) // the probe's lease has ended too, and no claim released it
	last := claim("k")
	e.await(last, hour)
	e.release(last)
	e.complete(one, 200, hour)
	e.wantKnown(last, 200)
}

// Two handlers outlive their leases, one after the other, and a third holds the event. Neither of
// the late ones may answer for it or free it.
func twoLeasesEnd(e *events) {
	one, two, three := claim("k"), claim("k"), claim("k")
	e.wantClaimed(one, short, true)
	e.await(two, short)
	e.await(three, hour)
	for _, late := range []store.Claim{one, two} {
		e.wantLeaseLost(late)
		e.release(late)
		e.wantClaimed(claim("k"), hour, false)
	}
	e.complete(three, 202, hour)
	e.wantKnown(one, 202)
}

// A store that lost its data must not make the middleware forget an effect that it knows of.
func claimForgotten(e *events) {
	one := claim("k")
	e.complete(one, 200, hour)
	e.wantKnown(claim("k"), 200)
}

func timeToLiveEnds(e *events) {
	one, two := claim("k"), claim("k")
	e.wantClaimed(one, hour, true)
	e.complete(one, 200, short)
	e.await(two, hour)
	e.complete(two, 202, hour)
	e.wantKnown(one, 202)
}

func statuses(e *events) {
	for status := 200; status <= 299; status += 33 {
		name := fmt.Sprint("answered ", status)
		c := claim(name)
		e.wantClaimed(c, hour, true)
		e.complete(c, status, hour)
		e.wantKnown(claim(name), status)
	}
}

func keysOfEveryForm(e *events) {
	var all strings.Builder
	for c := byte(' ') + 1; c < '~'; c++ {
		all.WriteByte(c)
	}
	keys := []string{
		all.String(), strings.Repeat("k", 255), strings.Repeat("k", 254), "{a}", "{b}", "a b", "a  b", "A B", "%00", `\n`, "*", "'; --",
		"null", "0", "00", "a:b", "a:", "a", "a/../b", "$ref", "#key", ":token",
	}
	for _, key := range keys {
		c := claim(key)
		e.wantClaimed(c, hour, true)
		e.complete(c, 200, hour)
	}
	for _, key := range keys {
		e.wantKnown(claim(key), 200)
	}
}

// Names and keys must not run together: neither ("a:b", "c") with ("a", "b:c"), nor ("a", "b") with
// ("ab", "").
func namesApart(e *events) {
	pairs := [][2]string{
		{"a", "b:c"},
		{"a:b", "c"},
		{"a", "b"},
		{"a:", "b"},
		{"a", ":b"},
		{"a%3A", "b"},
		{"A", "b"},
		{"a b", "c"},
		{"a+b", "c"},
		{"a", "b c"},
		{"finance", "k"},
		{"stock", "k"},
	}
	each := func(do func(c store.Claim, status int)) {
		for i, names := range pairs {
			c := claim(names[1])
			c.Source = names[0]
			do(c, 200+i)
			c.Receiver, c.Source = names[0], "outbox"
			do(c, 220+i)
			c.Receiver, c.Source = names[0], names[1]
			c.IdempotencyKey = "k"
			do(c, 240+i)
		}
	}
	each(func(c store.Claim, status int) {
		e.wantClaimed(c, hour, true)
		e.complete(c, status, hour)
	})
	each(e.wantKnown)
}

// One event goes the whole way: the middleware claims it, completes it, and finds it again.
func behindMiddleware(e *events) {
	const secret = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDE=" //nolint:gosec // protects nothing
	status := http.StatusInternalServerError
	receivers := make([]http.Handler, 2)
	for i := range receivers {
		receive, err := store.Middleware(e.memory.Open(), store.Config{Config: consumer.Config{Receiver: "test", Secrets: []string{secret}}})
		if err != nil {
			e.Fatal(err)
		}
		receivers[i] = receive(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	}
	want := func(receiver int, body string, status int, replayed string) {
		e.Helper()
		event := consumer.Event{IdempotencyKey: "k", Type: "invoice.created", Payload: []byte(body)}
		r, err := consumertest.NewRequest(e.Context(), "/", event, secret)
		if err != nil {
			e.Fatal(err)
		}
		w := httptest.NewRecorder()
		receivers[receiver].ServeHTTP(w, r)
		if got := w.Header().Get("Idempotency-Replayed"); w.Code != status || got != replayed {
			e.Errorf("answered %d %s, replayed %q; want %d, %q", w.Code, w.Body, got, status, replayed)
		}
	}
	want(0, "{}", 500, "")
	status = http.StatusAccepted
	want(1, "{}", 202, "")
	want(0, "{}", 202, "true")
	want(1, "[]", 422, "")
}

// try asks for the event until the store answers: connections that broke take a call each to find
// out.
func (e *events) try(c store.Claim, lease time.Duration) store.Acquired {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.Context(), patience)
	defer cancel()
	for ctx.Err() == nil {
		if got, err := e.store.Acquire(ctx, c, lease); err == nil {
			return got
		}
	}
	e.Fatal("the memory does not come back")
	return store.Acquired{}
}

// While it is unknown whether an event is known, its handler must not run.
func memoryAway(e *events) {
	one := claim("k")
	e.wantClaimed(claim("another"), hour, true) // on a connection that is about to break
	e.memory.Stop()
	for range 2 { // once on a broken connection, once on none
		if got, err := e.store.Acquire(e.Context(), one, hour); err == nil {
			e.Errorf("acquired %+v of a server that is away", got)
		}
	}
	if err := e.store.Complete(e.Context(), one, known(one, 200), hour); err == nil || errors.Is(err, store.ErrLeaseLost) {
		e.Errorf("complete: %v", err)
	}
	e.memory.Start()
	if got := e.try(one, hour); !got.Claimed {
		e.Errorf("acquired %+v", got)
	}
}

func memoryRestarts(e *events) {
	one, again := claim("k"), claim("k")
	e.wantClaimed(one, hour, true)
	e.complete(one, 201, hour)
	e.memory.Stop()
	e.memory.Start()
	if got := e.try(again, hour); e.survives && (got.Known == nil || got.Known.Status != 201) || !e.survives && !got.Claimed {
		e.Errorf("after the restart: acquired %+v", got)
	}
}

// The server restarts while a handler runs. Its completion counts, whether or not the claim is
// known.
func memoryGoesMeanwhile(e *events) {
	one, other := claim("k"), claim("another")
	e.wantClaimed(one, hour, true)
	e.wantClaimed(other, short, true)
	e.memory.Stop()
	e.memory.Start()
	e.try(claim("to connect again"), hour)
	e.complete(one, 201, hour)
	e.wantKnown(claim("k"), 201)
	e.await(claim("another"), hour) // which was never completed
}
