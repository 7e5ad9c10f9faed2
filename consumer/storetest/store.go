package storetest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// RunStore tests a store without a receiver. open returns a store whose events no other call of open shows.
func RunStore(t *testing.T, open func(t testing.TB) consumer.Store) {
	for name, test := range map[string]func(*events){
		"one claim at a time":               oneClaim,
		"one of fifty":                      oneOfFifty,
		"commands are repeated":             repeatedCommands,
		"what is known stays":               knownStays,
		"others have no say":                othersHaveNoSay,
		"a lease ends":                      leaseEnds,
		"a lease ends and nobody takes":     leaseEndsAlone,
		"the claim is forgotten":            claimForgotten,
		"the time to live ends":             timeToLiveEnds,
		"responses of every form":           responses,
		"a response larger than the limits": hugeResponse,
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
	store consumer.Store
}

// claim is a new request's claim to the event key.
func claim(key string) consumer.Claim {
	return consumer.Claim{Source: "outbox", Key: key, Hash: sha256.Sum256([]byte(key)), Token: rand.Text()}
}

func (e *events) acquire(c consumer.Claim, lease time.Duration) consumer.Acquired {
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

// claimed asserts who gets the event: this claim, or for another that holds it, nobody.
func (e *events) wantClaimed(c consumer.Claim, lease time.Duration, want bool) {
	e.Helper()
	if got := e.acquire(c, lease); got.Claimed != want || got.Known != nil {
		e.Errorf("acquired %+v, want claimed %v", got, want)
	}
}

func (e *events) complete(c consumer.Claim, r consumer.Response, ttl time.Duration) {
	e.Helper()
	if err := e.store.Complete(e.Context(), c, r, ttl); err != nil {
		e.Fatalf("complete: %v", err)
	}
}

func (e *events) wantLeaseLost(c consumer.Claim) {
	e.Helper()
	if err := e.store.Complete(e.Context(), c, consumer.Response{Status: 299}, hour); !errors.Is(err, consumer.ErrLeaseLost) {
		e.Errorf("complete: %v, want ErrLeaseLost", err)
	}
}

func (e *events) release(c consumer.Claim) {
	e.Helper()
	if err := e.store.Release(e.Context(), c); err != nil {
		e.Fatalf("release: %v", err)
	}
}

// wantKnown asserts what a new request, or another claim of the same one, is told.
func (e *events) wantKnown(c consumer.Claim, want consumer.Response) {
	e.Helper()
	got := e.acquire(c, hour).Known
	if got == nil {
		e.Fatal("the event is not known")
	}
	r := got.Response
	if got.Hash != c.Hash || r.Status != want.Status || string(r.Body) != string(want.Body) || r.BodyOmitted != want.BodyOmitted ||
		!maps.EqualFunc(r.Header, want.Header, slices.Equal[[]string]) {
		e.Errorf("known %+v, want %+v", r, want)
	}
}

// await claims the event until it is free.
func (e *events) await(c consumer.Claim, lease time.Duration) {
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
	start, claimed := make(chan struct{}), make(chan consumer.Claim, 50)
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
	e.complete(<-claimed, consumer.Response{Status: 200}, hour)
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
	want := consumer.Response{Status: 201, Body: []byte("done")}
	e.complete(two, want, hour)
	e.complete(two, want, hour)
	e.wantKnown(two, want)
}

// Nothing but time takes back what is known.
func knownStays(e *events) {
	one := claim("k")
	want := consumer.Response{Status: 201, Header: http.Header{"X-A": {"1"}}, Body: []byte("done")}
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
	e.complete(one, consumer.Response{Status: 204}, hour)
	e.wantKnown(two, consumer.Response{Status: 204})
}

func leaseEnds(e *events) {
	one, two := claim("k"), claim("k")
	e.wantClaimed(one, short, true)
	e.await(two, hour)
	e.release(one)
	e.wantLeaseLost(one)
	e.wantClaimed(one, hour, false)
	e.complete(two, consumer.Response{Status: 200}, hour)
	e.wantLeaseLost(one)
	e.wantKnown(one, consumer.Response{Status: 200})
}

func leaseEndsAlone(e *events) {
	one, probe := claim("k"), claim("k")
	e.wantClaimed(one, short, true)
	e.await(probe, short)
	e.await(claim("k"), short) // the probe's lease has ended too, and nobody released it
	last := claim("k")
	e.await(last, hour)
	e.release(last)
	e.complete(one, consumer.Response{Status: 200}, hour)
	e.wantKnown(last, consumer.Response{Status: 200})
}

// A store that lost its data must not make the middleware forget an effect that it knows of.
func claimForgotten(e *events) {
	one := claim("k")
	e.complete(one, consumer.Response{Status: 200}, hour)
	e.wantKnown(claim("k"), consumer.Response{Status: 200})
}

func timeToLiveEnds(e *events) {
	one, two := claim("k"), claim("k")
	e.wantClaimed(one, hour, true)
	e.complete(one, consumer.Response{Status: 200}, short)
	e.await(two, hour)
	e.complete(two, consumer.Response{Status: 202}, hour)
	e.wantKnown(one, consumer.Response{Status: 202})
}

func responses(e *events) {
	for name, want := range map[string]consumer.Response{
		"status only":     {Status: 204},
		"empty header":    {Status: 200, Header: http.Header{}},
		"header":          {Status: 200, Header: http.Header{"Vary": {"Accept", "Origin"}, "X-Empty": {""}, "X-Odd": {`"\ é` + "\t"}}},
		"bytes":           {Status: 200, Body: []byte("\x00\xff\xfe\r\n$9 \n")},
		"the default max": {Status: 200, Body: []byte(strings.Repeat("x", 64<<10))},
		"omitted":         {Status: 200, BodyOmitted: true},
		"of the margin":   {Status: 299},
	} {
		c := claim(name)
		e.wantClaimed(c, hour, true)
		e.complete(c, want, hour)
		e.wantKnown(claim(name), want)
	}
}

// What a store cannot keep whole it keeps without the body, or without the header: the event counts, not its response.
func hugeResponse(e *events) {
	for name, r := range map[string]consumer.Response{
		"body":   {Status: 201, Body: []byte(strings.Repeat("x", 1<<20)), Header: http.Header{"X-A": {"1"}}},
		"header": {Status: 201, Body: []byte("x"), Header: http.Header{"X-A": {strings.Repeat("x", 1<<20)}}},
	} {
		c := claim(name)
		e.wantClaimed(c, hour, true)
		e.complete(c, r, hour)
		known := e.acquire(claim(name), hour).Known
		if known == nil || known.Hash != c.Hash || known.Response.Status != 201 {
			e.Fatalf("%s: known %v", name, known != nil)
		}
		if got := known.Response; got.BodyOmitted == (len(got.Body) == len(r.Body)) || len(got.Body) > 0 && len(got.Body) != len(r.Body) {
			e.Errorf("%s: %d bytes of body, omitted %v", name, len(got.Body), got.BodyOmitted)
		}
	}
}
