package storetest

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer/store"
)

// A Subject is the store that [Run] tests. A function that is nil leaves out the tests that need
// it.
type Subject struct {
	// New returns an empty memory for one test. The tests run in parallel, and one server may serve
	// them all.
	New func(t testing.TB) Memory

	// NewServer returns an empty memory on its own server, with Stop and Start.
	NewServer func(t testing.TB) Memory

	// SurvivesRestart says that what was completed is still known after the server of NewServer was
	// killed and started again. Default false: the tests then demand that it is forgotten.
	SurvivesRestart bool
}

// A Memory is where the processes of one test remember events.
type Memory struct {
	// Open returns the store with its own connections, as another process has it. Required.
	Open func() store.Store

	// Stop kills the server, and returns when connecting fails. Start starts it again with the data
	// that it has kept, and returns when connecting succeeds. Both are nil but for
	// [Subject].NewServer.
	Stop, Start func()
}

// Run tests a store.
func Run(t *testing.T, s Subject) {
	each := func(tests map[string]func(*events), open func(t testing.TB) Memory) {
		for name, test := range tests {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				memory := open(t)
				test(&events{T: t, memory: memory, store: memory.Open(), survives: s.SurvivesRestart})
			})
		}
	}
	if s.New != nil {
		each(tests, s.New)
	}
	if s.NewServer != nil {
		each(restarts, s.NewServer)
	}
}

// tests leave the server running.
var tests = map[string]func(*events){
	"one claim at a time":               oneClaim,
	"one of fifty":                      oneOfFifty,
	"commands are repeated":             repeatedCommands,
	"what is known stays":               knownStays,
	"others have no say":                othersHaveNoSay,
	"a lease ends":                      leaseEnds,
	"a lease ends and no request takes": leaseEndsAlone,
	"two leases end":                    twoLeasesEnd,
	"the claim is forgotten":            claimForgotten,
	"the time to live ends":             timeToLiveEnds,
	"every status of success":           statuses,
	"keys of every form":                keysOfEveryForm,
	"names are apart":                   namesApart,
	"behind store.Middleware":           behindMiddleware,
}

// restarts stop the server and start it again.
var restarts = map[string]func(*events){
	"the memory is away":                   memoryAway,
	"the memory restarts":                  memoryRestarts,
	"the memory goes while a handler runs": memoryGoesMeanwhile,
}
