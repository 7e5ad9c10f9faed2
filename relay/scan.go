package relay

import "github.com/outbox-relay/outbox-relay/internal/relay/ordering"

// A scan is the part of the due deliveries of one class that a claim reads.
type scan struct {
	class  class
	free   int    // how many deliveries without an ordering key it may bring
	after  keyset // zero: from the very front
	until  keyset // zero: to the end
	rescan bool   // it reads once more what the cursor of its class has passed
	clear  bool   // the scan before it could take all that it read

	// shared: other relays claim here, too. The scan passes what they have in flight. Unless alone is set, it reads nothing while
	// another relay makes such a claim.
	shared, alone bool
}

// A readyKey is an ordering key whose next delivery may be claimed.
type readyKey struct {
	key   string
	class class          // of what was found
	found ordering.Place // that was found; zero: none
	floor int64          // every delivery of the key up to this event is settled; see floors
}

// A scanResult says how far a scan came.
type scanResult struct {
	last keyset // the last delivery it read; zero: there was none
	more bool   // there may be due deliveries behind last
	keys []foundKey

	candidates int  // free deliveries within its room that it read
	passed     int  // deliveries in flight that it passed
	unkeyed    int  // how many of the candidates have no ordering key
	unread     bool // nothing was read: the scan was put off, or another session held the front's lock
}

// A foundKey is an ordering key of which a scan saw a delivery that waits, the earliest one it saw.
type foundKey struct {
	key   string
	place ordering.Place
	joins bool // the scan saw one that has to join the key
}

const scanExtra = 100 // deliveries that a scan may read beyond its room, since some have an ordering key or are in flight

const scanPasses = 3 * maxTaken // deliveries in flight that a shared scan may pass: what three other relays hold at most

// maxCandidates returns how many free deliveries a scan may read. The one beyond its room shows whether there are more. A clear scan reads
// no further: with 50 destinations a scan brings some ten, and a hundred more would cost the server several times as much.
func (s *scan) maxCandidates() int32 {
	if s.clear {
		return int32(s.free + 1)
	}
	return int32(s.free + scanExtra)
}

// reads returns how many deliveries a scan may read, those in flight included.
func (s *scan) reads() int32 {
	if s.shared {
		return s.maxCandidates() + scanPasses
	}
	return s.maxCandidates()
}
