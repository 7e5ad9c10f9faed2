package consumer

import (
	"net"
	"sync"
)

const (
	// ranks is how many ranks senders have: unknown, of a known address, on a known connection.
	ranks = 3
	// mostSenders bounds what is remembered of senders. Only who signs adds to it.
	mostSenders = 4096
)

// senders remembers from where requests came that were proven, so that their next bodies need not
// queue with those of strangers. A proxy in front, or a middleware that changes RemoteAddr, may
// make a stranger look like one of them: then both are served in turn. It is safe for concurrent
// use.
type senders struct {
	mu    sync.Mutex
	known map[string]struct{} // addresses, with and without a port
}

// add remembers where a proven request came from.
func (s *senders) add(remote string) {
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		return // such as a message of a log
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, is := s.known[remote]; is {
		return
	}
	if s.known == nil || len(s.known) >= mostSenders {
		s.known = map[string]struct{}{} // who is still there is soon known again
	}
	s.known[remote], s.known[host] = struct{}{}, struct{}{}
}

// rank returns how far a sender is known: 0 is not at all, ranks-1 is best.
func (s *senders) rank(remote string) int {
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, is := s.known[remote]; is {
		return 2
	}
	if _, is := s.known[host]; is {
		return 1
	}
	return 0
}
