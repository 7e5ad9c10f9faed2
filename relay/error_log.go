package relay

import (
	"strings"
	"sync"
	"time"
)

// repeatAfter is how long an operation that fails again and again with the same error is not
// logged.
const repeatAfter = 30 * time.Second

// maxTold bounds how many different errors are remembered.
const maxTold = 100

// An errorLog keeps an outage from filling the log: each operation is tried again several times a
// second. It is safe for concurrent use. The zero value has told nothing.
type errorLog struct {
	mu   sync.Mutex
	told map[string]toldError // by operation and text, without digits: an address may have another port each time
}

type toldError struct {
	at    time.Time
	again int // since then
}

// tell reports whether a failure is to be logged: the first one with its text, and then one each
// repeatAfter, with how often it happened again since.
func (l *errorLog) tell(operation, text string, now time.Time) (again int, tell bool) {
	key := strings.Map(func(c rune) rune {
		if '0' <= c && c <= '9' {
			return -1
		}
		return c
	}, operation+" "+text)
	l.mu.Lock()
	defer l.mu.Unlock()
	last, known := l.told[key]
	if known && now.Sub(last.at) < repeatAfter {
		last.again++
		l.told[key] = last
		return 0, false
	}
	if l.told == nil || len(l.told) >= maxTold {
		l.told = map[string]toldError{}
	}
	l.told[key] = toldError{at: now}
	if known {
		last.again++
	}
	return last.again, true
}
