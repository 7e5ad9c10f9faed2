package storetest

import (
	"context"
	"net/http"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer/store"
)

// A Subject is what [Run] puts to the test.
type Subject struct {
	// New makes an empty memory for one test. The tests run in parallel, and one server may serve them all. Required.
	New func(t testing.TB) Memory

	// NewServer makes one on a server of its own, with Stop and Start. Required.
	NewServer func(t testing.TB) Memory

	// Promises are what the memory holds.
	Promises Promises
}

// Promises are what distinguishes one memory from another. The zero value promises least.
type Promises struct {
	// EffectIsAtomic: the handler's effect and the memory of its event come about together or not at all, and no other
	// takes an event over from a living handler. Otherwise an effect is there at once and stays, and an event is held by
	// a lease.
	EffectIsAtomic bool

	// SurvivesRestart: what was answered is still known after the server was killed and started again.
	SurvivesRestart bool
}

// A Memory is where the receivers of one test remember events.
type Memory struct {
	// Middleware makes one more receiver's middleware, with connections of its own, as another process has. A memory
	// without leases uses the Config alone. Required.
	Middleware func(cfg store.Config) func(http.Handler) http.Handler

	// Effect is what a handler does for an event: it counts key, in the handler's transaction. Effects returns the
	// count, as others see it. Required for a memory whose effect is atomic, and unused otherwise.
	Effect  func(ctx context.Context, key string) error
	Effects func(t testing.TB, key string) int

	// Stop kills the server, and Start starts it again with the data that it has kept. They return when connecting
	// fails, and when it succeeds. Nil but for [Subject].NewServer.
	Stop, Start func()
}

// Run tests the receivers of a memory.
func Run(t *testing.T, s Subject) {
	for name, test := range map[string]func(*world){
		"first, then duplicates":               firstThenDuplicates,
		"what is kept of an answer":            keptAnswers,
		"another body":                         anotherBody,
		"keys of every form":                   keysOfEveryForm,
		"sources keep their keys apart":        sourcesApart,
		"a handler that fails":                 failingHandler,
		"a handler that does not return":       handlerThatDoesNotReturn,
		"the client goes":                      clientGoes,
		"in flight":                            inFlight,
		"fifty at once":                        fiftyAtOnce,
		"fifty at once, and handlers fail":     fiftyAtOnceFailing,
		"the handler's time":                   handlersTime,
		"a handler outlives its lease":         handlerOutlivesLease,
		"a late success overwrites nothing":    lateSuccess,
		"a late failure releases nothing":      lateFailure,
		"late, and no request has taken over":  lateAlone,
		"older than the memory":                olderThanMemory,
		"the memory is away":                   memoryAway,
		"the memory restarts":                  memoryRestarts,
		"the memory goes while a handler runs": memoryGoesMeanwhile,
		"it comes back while the handler runs": memoryRestartsMeanwhile,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(&world{T: t, subject: s, counted: map[string]int{}})
		})
	}
}
