package guard

import (
	"sync"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/time/rate"
)

const (
	wrongAtOnce    = 10   // tokens that one address may get wrong without a wait
	wrongAddresses = 1000 // that are remembered; all others share one place
	wrongLogEvery  = time.Minute
)

// wrongTokens slows whoever guesses: after ten wrong tokens an address may try one a second, right
// or wrong. Those of a role that have its cookie count as an address. It logs them once a minute
// for each address. It is safe for concurrent use.
type wrongTokens struct {
	log zerolog.Logger

	mu sync.Mutex
	of map[string]*guesses // by address
}

type guesses struct {
	limit  *rate.Limiter
	count  int // since the last line in the log
	logged time.Time
}

// place returns what is remembered of an address; nil: nothing. w.mu is held.
func (w *wrongTokens) place(address string) *guesses {
	if g := w.of[address]; g != nil || len(w.of) < wrongAddresses {
		return g
	}
	return w.of[""]
}

// mayTry reports whether an address may try a token now.
func (w *wrongTokens) mayTry(address string, now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	g := w.place(address)
	return g == nil || g.limit.TokensAt(now) >= 1
}

// wrong notes that a wrong token was tried from an address, which counts for a place: the address,
// or a role.
func (w *wrongTokens) wrong(place, address string, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.of) >= wrongAddresses {
		for known, g := range w.of {
			if g.limit.TokensAt(now) >= wrongAtOnce && now.Sub(g.logged) > wrongLogEvery {
				delete(w.of, known)
			}
		}
	}
	g := w.place(place)
	if g == nil {
		if len(w.of) >= wrongAddresses {
			place = ""
		}
		g = &guesses{limit: rate.NewLimiter(1, wrongAtOnce)}
		w.of[place] = g
	}
	g.limit.AllowN(now, 1)
	g.count++
	if now.Sub(g.logged) >= wrongLogEvery {
		w.log.Warn().Str("address", address).Int("count", g.count).Msg("wrong tokens were sent to the page or the API")
		g.count, g.logged = 0, now
	}
}
