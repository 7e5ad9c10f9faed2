package relay

import (
	"sync"
	"time"
)

// repeatAfter is how long an operation that fails again and again with the same error is not logged.
const repeatAfter = 30 * time.Second

// An errorLog keeps an outage from filling the log: each operation is tried again several times a second. It is safe for concurrent
// use. The zero value has told nothing.
type errorLog struct {
	mu   sync.Mutex
	told map[string]toldError // by operation
}

type toldError struct {
	text  string
	at    time.Time
	again int // since then
}

// tell reports whether a failure is to be logged: the first one with its text, and then one each repeatAfter, with how often it happened
// again since.
func (l *errorLog) tell(operation, text string, now time.Time) (again int, tell bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, known := l.told[operation]
	if known && last.text == text {
		last.again++
		if now.Sub(last.at) < repeatAfter {
			l.told[operation] = last
			return 0, false
		}
		again = last.again
	}
	if l.told == nil {
		l.told = map[string]toldError{}
	}
	l.told[operation] = toldError{text: text, at: now}
	return again, true
}
