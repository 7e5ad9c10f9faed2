package reconcile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// What a [Request] asks for.
const (
	AskDescribe   = "describe"   // clock, retention, size
	AskDigest     = "digest"     // digests of all ranges, from one part of the table
	AskList       = "list"       // the keys that follow one
	AskFind       = "find"       // which of these keys are there
	AskUnfinished = "unfinished" // what an inbox has recorded and not finished
	AskDoubled    = "doubled"    // what has more than one effect, of all events or of these keys
	AskMissing    = "missing"    // what was processed and has no effect, of all events or of these keys
)

// Limits of a [Request]. As JSON the largest one has less than 1 MiB, even if every character of
// its keys is a quote.
const (
	MaxBounds     = 8191
	MaxBoundBytes = 480 << 10
	MaxKeys       = 1000
	MaxKeyBytes   = 1024 // of one key; those of a relay have 255
	saltBytes     = 16
)

// A Request is one question to a receiver. It travels as JSON.
type Request struct {
	Ask string `json:"ask"`
	// Since and Until bound when an event was received, by the receiver's clock: of digests, what
	// is unfinished, what is doubled and what is missing. Zero: no bound.
	Since time.Time `json:"since,omitzero"`
	Until time.Time `json:"until,omitzero"`
	// Salt begins every hash of a digest: 16 bytes, drawn for each run.
	Salt []byte `json:"salt,omitempty"`
	// Bounds are the last keys of all ranges but the last, ascending in the order of bytes.
	Bounds []string `json:"bounds,omitempty"`
	// Page of the table with which a digest begins: 0, or Next of the answer before.
	Page int64 `json:"page,omitempty"`
	// After is the key that a list follows. Empty: the list begins with the first.
	After string `json:"after,omitempty"`
	// Keys to find. Of what is doubled or missing only these are meant; nil: all are.
	Keys []string `json:"keys,omitempty"`
	// Limit of rows in a list: 1 to [MaxKeys].
	Limit int `json:"limit,omitempty"`
}

// ErrRequest is what is wrong with a request that no receiver answers.
var ErrRequest = errors.New("malformed question")

// Encode returns the request as JSON.
func (q *Request) Encode() ([]byte, error) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(q)
	return b.Bytes(), err
}

func (q *Request) check() error {
	size := 0
	for _, key := range q.Bounds {
		size += len(key)
	}
	tooLong := func(key string) bool { return len(key) > MaxKeyBytes }
	switch lists := q.Ask == AskList || q.Ask == AskUnfinished || q.Ask == AskDoubled || q.Ask == AskMissing; {
	case q.Ask == AskDigest && len(q.Salt) != saltBytes:
		return fmt.Errorf("%w: salt has %d bytes, not %d", ErrRequest, len(q.Salt), saltBytes)
	case len(q.Bounds) > MaxBounds || size > MaxBoundBytes:
		return fmt.Errorf("%w: bounds has more than %d keys or %d bytes", ErrRequest, MaxBounds, MaxBoundBytes)
	case !slices.IsSorted(q.Bounds) || len(slices.Compact(slices.Clone(q.Bounds))) < len(q.Bounds):
		return fmt.Errorf("%w: bounds does not ascend", ErrRequest)
	case q.Page < 0:
		return fmt.Errorf("%w: page is below 0", ErrRequest)
	case len(q.Keys) > MaxKeys || tooLong(q.After) || slices.ContainsFunc(q.Keys, tooLong):
		return fmt.Errorf("%w: more than %d keys, or one of more than %d bytes", ErrRequest, MaxKeys, MaxKeyBytes)
	case lists && (q.Limit < 1 || q.Limit > MaxKeys):
		return fmt.Errorf("%w: limit is not 1 to %d", ErrRequest, MaxKeys)
	}
	return nil
}

// An Answer is what a receiver says. Only the fields that were asked for are set.
type Answer struct {
	// Receiver and Source say whose events these are.
	Receiver string `json:"receiver"`
	Source   string `json:"source"`
	// CountsEffects: the receiver can tell which keys had more than one effect, or none.
	CountsEffects bool `json:"counts_effects,omitempty"`
	// Now is the time of the receiver's database. Asked by describe.
	Now time.Time `json:"now,omitzero"`
	// RemembersSince is the time since which everything that was received is known. Zero: nothing
	// was ever forgotten.
	RemembersSince time.Time `json:"remembers_since,omitzero"`
	// Ranges are the digests of a part of the table; ranges without a row are left out.
	Ranges []Range `json:"ranges,omitempty"`
	// Next is the page with which the rest begins. Pages is how many there are: at the end, Next is
	// not below it.
	Next  int64 `json:"next,omitempty"`
	Pages int64 `json:"pages,omitempty"`

	// Held are rows, in the order of their keys; of a digest those whose effect is in doubt.
	Held []Held `json:"held,omitempty"`
}

// A Range is the digest of the keys of one range.
type Range struct {
	Number int    `json:"r"`
	Count  int64  `json:"n"`
	Sum    uint64 `json:"s,string"` // of the hashes, modulo 2^64
}

// A Held is an event that a receiver has. It has no payload.
type Held struct {
	Key        string    `json:"key"`
	ReceivedAt time.Time `json:"received_at,omitzero"`
	// EventID in the sender's outbox, as its relay said; 0: unknown. Only what was found has it.
	EventID int64 `json:"event_id,omitempty,string"`
	// State is succeeded, ignored, pending, processing or failed; in a list also recorded, for an
	// event of an inbox in any state.
	State string `json:"state,omitempty"`
	// Effects is how many there are, where that was asked.
	Effects int64 `json:"effects,omitempty"`
}

// Finished reports whether nothing is to happen any more: the effect is there, or was given up.
func (h Held) Finished() bool { return h.State == "succeeded" || h.State == "ignored" }
