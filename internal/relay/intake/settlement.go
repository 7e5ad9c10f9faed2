package intake

import "time"

// Status is what a delivery has become when its row is written.
type Status string

// The states that a relay gives to a delivery without a row.
const (
	Pending   Status = "pending"
	Delivered Status = "delivered"
)

// A Settlement is what one relay writes together.
type Settlement struct {
	Relay int32
	// Ranges names each range of which there are deliveries, and each that ends, in ascending order.
	Ranges     []RangeRef
	Deliveries []Delivery
}

// A RangeRef names a range that a relay has.
type RangeRef struct {
	Seq, Fence int64
	// Ended says that after this settlement each delivery of the range has a row.
	Ended bool
}

// A Delivery is a row of outbox_delivery that does not exist yet.
type Delivery struct {
	Seq         int64 // of the range
	EventID     int64
	Destination string // "": no route matches, the event waits for one
	Status      Status
	Attempts    int
	// Wait is how long a pending delivery waits for its next attempt.
	Wait time.Duration
	// DueAt is when a pending delivery joins its ordering key, by the database's clock. Until then it holds no other one. Zero: it has
	// joined its key, and Wait counts.
	DueAt time.Time
	// Since is how long ago the last attempt began.
	Since        time.Duration
	Code         int16 // status code of the answer; 0: none
	Reason       string
	Error        string
	OrderingKey  *string
	PayloadBytes int
	NotAfter     time.Time // what the receiver was promised; zero: nothing
	BlockedBy    int64     // the head of its ordering key behind which a pending delivery waits; 0: none
	Rescues      int       // how often a relay died that may have had it in flight
	// Lease makes a pending delivery one that the relay has claimed, under the range's fence: an attempt is still in flight, and the
	// range ends without waiting for it. 0: free.
	Lease time.Duration
}

// Settled is what became of a settlement.
type Settled struct {
	// Lost are ranges that are not this relay's any more. Nothing of them was written.
	Lost []int64
	// Existing are the indexes of deliveries that had a row already.
	Existing []int
}
