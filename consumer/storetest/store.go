package storetest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/store"
)

// RunStore tests a store without a receiver. open returns a store whose events no other call of open shows.
func RunStore(t *testing.T, open func(t testing.TB) store.Store) {
	for name, test := range map[string]func(*events){
		"one claim at a time":               oneClaim,
		"one of fifty":                      oneOfFifty,
		"commands are repeated":             repeatedCommands,
		"what is known stays":               knownStays,
		"others have no say":                othersHaveNoSay,
		"a lease ends":                      leaseEnds,
		"a lease ends and no request takes": leaseEndsAlone,
		"the claim is forgotten":            claimForgotten,
		"the time to live ends":             timeToLiveEnds,
		"every status of success":           statuses,
	} {
		t.Run("store/"+name, func(t *testing.T) {
			t.Parallel()
			test(&events{T: t, store: open(t)})
		})
	}
}

// events are those of one store.
type events struct {
	*testing.T
	store store.Store
}

// claim is a new request's claim to the event key.
func claim(key string) store.Claim {
	return store.Claim{Source: "outbox", Key: key, Hash: sha256.Sum256([]byte(key)), Token: rand.Text()}
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

// claimed asserts who gets the event: this claim, or for another that holds it, neither.
func (e *events) wantClaimed(c store.Claim, lease time.Duration, want bool) {
	e.Helper()
	if got := e.acquire(c, lease); got.Claimed != want || got.Known != nil {
		e.Errorf("acquired %+v, want claimed %v", got, want)
	}
}

func (e *events) complete(c store.Claim, status int, ttl time.Duration) {
	e.Helper()
	if err := e.store.Complete(e.Context(), c, status, ttl); err != nil {
		e.Fatalf("complete: %v", err)
	}
}

func (e *events) wantLeaseLost(c store.Claim) {
	e.Helper()
	if err := e.store.Complete(e.Context(), c, 299, hour); !errors.Is(err, store.ErrLeaseLost) {
		e.Errorf("complete: %v, want ErrLeaseLost", err)
	}
}

func (e *events) release(c store.Claim) {
	e.Helper()
	if err := e.store.Release(e.Context(), c); err != nil {
		e.Fatalf("release: %v", err)
	}
}

// wantKnown asserts what a new request, or another claim of the same one, is told.
func (e *events) wantKnown(c store.Claim, status int) {
	e.Helper()
	if got := e.acquire(c, hour).Known; got == nil || got.Hash != c.Hash || got.Status != status {
		e.Errorf("known %+v, want status %d", got, status)
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
	start, claimed := make(chan struct{}), make(chan store.Claim, 50)
	for range cap(claimed) {
		asking.Go(func() {
			c := claim("k")
			<-start
			got, err := e.store.Acquire(e.Context(), c, hour)
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
