package reconcile

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
)

// A Digest adds keys to the counts and sums of their ranges. The order of the keys does not matter,
// and digests of two parts of a table add up to that of the whole. The hash of a key is the first 8
// bytes of SHA-256 over salt and key, big-endian: the salt is drawn for each run, so who chooses
// keys cannot choose keys whose sums are equal. It is not safe for concurrent use.
type Digest struct {
	bounds []string
	Counts []int64
	Sums   []uint64
	buffer []byte // salt and key
}

// NewSalt draws the salt of a run.
func NewSalt() []byte {
	salt := make([]byte, saltBytes)
	_, _ = rand.Read(salt) // never fails
	return salt
}

// NewDigest returns an empty digest. bounds are the last keys of all ranges but the last,
// ascending, and are kept.
func NewDigest(salt []byte, bounds []string) *Digest {
	n := len(bounds) + 1
	return &Digest{bounds: bounds, Counts: make([]int64, n), Sums: make([]uint64, n), buffer: append(make([]byte, 0, 512), salt...)}
}

// Range returns the number of the range that has the key.
func (d *Digest) Range(key []byte) int {
	low, high := 0, len(d.bounds)
	for low < high {
		if middle := int(uint(low+high) >> 1); d.bounds[middle] < string(key) {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low
}

// Hash returns the hash of a key.
func (d *Digest) Hash(key []byte) uint64 {
	sum := sha256.Sum256(append(d.buffer[:saltBytes], key...))
	return binary.BigEndian.Uint64(sum[:])
}

// Add adds a key.
func (d *Digest) Add(key []byte) {
	r := d.Range(key)
	d.Counts[r]++
	d.Sums[r] += d.Hash(key)
}

// ranges returns what is not empty.
func (d *Digest) ranges() (all []Range) {
	for i, n := range d.Counts {
		if n > 0 {
			all = append(all, Range{i, n, d.Sums[i]})
		}
	}
	return all
}

// Merge adds digests of the same ranges. It reports false for one that is not among them.
func (d *Digest) Merge(all []Range) bool {
	for _, r := range all {
		if r.Number < 0 || r.Number >= len(d.Counts) {
			return false
		}
		d.Counts[r.Number] += r.Count
		d.Sums[r.Number] += r.Sum
	}
	return true
}
