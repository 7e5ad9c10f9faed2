package lane

import "github.com/outbox-relay/outbox-relay/internal/relay/ordering"

// A Scan is the part of the due deliveries of one class that a claim reads.
type Scan struct {
	Class  Class
	Free   int    // how many deliveries without an ordering key it may bring
	After  Keyset // zero: from the very front
	Until  Keyset // zero: to the end
	Rescan bool   // it reads once more what the cursor of its class has passed
	Clear  bool   // the scan before it could take all that it read

	// Shared: other relays claim here, too. The scan passes what they have in flight. Unless Alone
	// is set, it reads nothing while another relay makes such a claim.
	Shared, Alone bool
}

// A ReadyKey is an ordering key whose next delivery may be claimed.
type ReadyKey struct {
	Key   string
	Class Class          // of what was found
	Found ordering.Place // that was found; zero: none
	Floor int64          // every delivery of the key up to this event is settled; see floors
}

// A ScanResult says how far a scan came.
type ScanResult struct {
	Last Keyset // the last delivery it read; zero: there was none
	More bool   // there may be due deliveries behind last
	Keys []FoundKey

	Candidates int  // free deliveries within its room that it read
	Passed     int  // deliveries in flight that it passed
	Unkeyed    int  // how many of the candidates have no ordering key
	Unread     bool // nothing was read: the scan was put off, or another session held the front's lock
}

// A FoundKey is an ordering key of which a scan saw a delivery that waits, the earliest one it saw.
type FoundKey struct {
	Key   string
	Place ordering.Place
	Joins bool // the scan saw one that has to join the key
}

const ScanExtra = 100 // deliveries that a scan may read beyond its room, since some have an ordering key or are in flight

const ScanPasses = 3 * maxTaken // deliveries in flight that a shared scan may pass: what three other relays hold at most

// MaxCandidates returns how many free deliveries a scan may read. The one beyond its room shows
// whether there are more. A clear scan reads no further: with 50 destinations a scan brings some
// ten, and a hundred more would cost the server several times as much.
func (s *Scan) MaxCandidates() int32 {
	if s.Clear {
		return int32(s.Free + 1)
	}
	return int32(s.Free + ScanExtra)
}

// Reads returns how many deliveries a scan may read, those in flight included.
func (s *Scan) Reads() int32 {
	if s.Shared {
		return s.MaxCandidates() + ScanPasses
	}
	return s.MaxCandidates()
}
