package main

import (
	"hash/fnv"
	"math"
	"time"
)

// A fault is what the receiver does wrong with one request.
type fault string

const (
	faultNone   fault = ""
	faultLate   fault = "late"   // commits, and answers later than some callers wait
	faultRefuse fault = "refuse" // writes its effect, then answers 500: it is rolled back
	faultLose   fault = "lose"   // commits, and closes the connection instead of answering
)

// faults says which share of requests, from 0 to 1, suffers which fault.
type faults struct {
	Late   float64 `help:"Share of requests that are answered late."`
	Refuse float64 `help:"Share of requests whose handler fails with 500."`
	Lose   float64 `help:"Share of requests whose effect commits and whose answer is lost."`
}

// latest is how late a late answer is at most.
const latest = 2700 * time.Millisecond

// pick draws the fault of one attempt, the same for the same seed, and how late the answer is.
func (f faults) pick(seed uint64, delivery string) (fault, time.Duration) {
	share := draw(seed, delivery)
	switch {
	case share < f.Late:
		return faultLate, time.Duration(share / f.Late * float64(latest))
	case share < f.Late+f.Refuse:
		return faultRefuse, 0
	case share < f.Late+f.Refuse+f.Lose:
		return faultLose, 0
	}
	return faultNone, 0
}

// draw returns a number in [0, 1) that looks random and depends on nothing but its arguments.
func draw(seed uint64, name string) float64 {
	h := fnv.New64a()
	for shift := 0; shift < 64; shift += 8 {
		_, _ = h.Write([]byte{byte(seed >> shift)})
	}
	_, _ = h.Write([]byte(name))
	// FNV mixes its last bytes little; the finalizer of SplitMix64 spreads them over all bits.
	x := h.Sum64()
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return float64((x^x>>31)>>11) / (math.MaxUint64>>11 + 1)
}
