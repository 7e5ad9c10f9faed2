package webhook

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"hash"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// DeriveID returns the webhook-id of an idempotency key: "evt_" and the first 32 hexadecimal digits
// of its SHA-256. It is the same on every attempt and free of dots, which the key need not be and
// Standard Webhooks forbids in an id.
func DeriveID(idempotencyKey string) string {
	sum := sha256.Sum256([]byte(idempotencyKey))
	return "evt_" + hex.EncodeToString(sum[:16])
}

// Sign sets webhook-id, webhook-timestamp and webhook-signature on header, which must already hold
// every [Covered] header that will be sent. For each secret the signature header holds a v1 and an
// x1. Without secrets it sets id and timestamp only, and removes a signature left from an earlier
// attempt.
func Sign(header http.Header, body []byte, now time.Time, secrets ...Secret) {
	NewSigner(secrets...).SetHeaders(header, body, now)
}

// A Signer signs requests with the same secrets. Unlike [Sign] it keeps the state that each key
// begins with, and takes the covered headers as a text. It is safe for concurrent use.
type Signer struct {
	macs    []*sync.Pool // of hash.Hash, one for each secret
	scratch sync.Pool    // of *signing
}

// A signing is the memory that one signature is made in.
type signing struct{ head, signatures, sum []byte }

// NewSigner returns a signer. Without secrets it makes id and timestamp only.
func NewSigner(secrets ...Secret) *Signer {
	s := &Signer{}
	for _, secret := range secrets {
		if !secret.IsZero() {
			s.macs = append(s.macs, &sync.Pool{New: func() any { return newMAC(secret) }})
		}
	}
	return s
}

// Signed are the three headers of Standard Webhooks. Without secrets there is no signature.
type Signed struct{ ID, Timestamp, Signature string }

// Sign returns the headers by which a request is signed: what [Sign] sets. covered holds every
// [Covered] header in the order of their names, as [AppendCovered] writes them.
func (s *Signer) Sign(idempotencyKey string, covered, body []byte, now time.Time) Signed {
	return s.sign(DeriveID(idempotencyKey), covered, body, now)
}

// SetHeaders is [Sign] with the secrets of the signer.
func (s *Signer) SetHeaders(header http.Header, body []byte, now time.Time) {
	signed := s.Sign(header.Get(IdempotencyKey), []byte(canonicalHeaders(header)), body, now)
	header[ID] = []string{signed.ID}
	header[Timestamp] = []string{signed.Timestamp}
	delete(header, Signature)
	if signed.Signature != "" {
		header[Signature] = []string{signed.Signature}
	}
}

func (s *Signer) sign(id string, covered, body []byte, now time.Time) Signed {
	signed := Signed{ID: id, Timestamp: strconv.FormatInt(now.Unix(), 10)}
	if len(s.macs) == 0 {
		return signed
	}
	scratch, ok := s.scratch.Get().(*signing)
	if !ok {
		scratch = &signing{}
	}
	defer s.scratch.Put(scratch)
	head := append(append(append(append(scratch.head[:0], signed.ID...), '.'), signed.Timestamp...), '.')
	v1 := len(head)
	head = append(append(append(append(head, "x1\n"...), signed.ID...), '\n'), signed.Timestamp...)
	head = append(append(append(head, '\n'), covered...), '\n')
	signatures := scratch.signatures[:0]
	for i, macs := range s.macs {
		mac := macs.Get().(hash.Hash)
		if i > 0 {
			signatures = append(signatures, ' ')
		}
		for _, part := range [...]struct {
			version string
			head    []byte
		}{{"v1,", head[:v1]}, {" x1,", head[v1:]}} {
			mac.Reset()
			mac.Write(part.head)
			mac.Write(body)
			scratch.sum = mac.Sum(scratch.sum[:0])
			signatures = base64.StdEncoding.AppendEncode(append(signatures, part.version...), scratch.sum)
		}
		macs.Put(mac)
	}
	scratch.head, scratch.signatures = head, signatures
	signed.Signature = string(signatures)
	return signed
}

// AppendCovered appends a header as x1 covers it: name:value, the name in lower case and the value
// without surrounding blanks, and a line feed.
func AppendCovered(text []byte, name, value string) []byte {
	for i := range len(name) {
		c := name[i]
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		text = append(text, c)
	}
	text = append(append(append(text, ':'), textproto.TrimString(value)...), '\n')
	return text
}

// signV1 is the signature of Standard Webhooks: HMAC-SHA256 over "id.timestamp.body".
func signV1(secret Secret, id, timestamp string, body []byte) []byte {
	mac := newMAC(secret, id, ".", timestamp, ".")
	mac.Write(body)
	return mac.Sum(nil)
}

// signX1 is HMAC-SHA256 over the lines
//
//	x1
//	id
//	timestamp
//	name:value     of every covered header, name in lower case, sorted by name, repeated values in their order
//	(empty line)
//	body
//
// each ended by one "\n". No id, timestamp, name or value can contain a line feed, so no two
// requests share a text.
func signX1(secret Secret, id, timestamp, covered string, body []byte) []byte {
	mac := newMAC(secret, "x1\n", id, "\n", timestamp, "\n", covered, "\n")
	mac.Write(body)
	return mac.Sum(nil)
}

func newMAC(secret Secret, parts ...string) hash.Hash {
	mac := hmac.New(sha256.New, []byte(*secret.key))
	for _, part := range parts {
		mac.Write([]byte(part))
	}
	return mac
}

// canonicalHeaders returns the lines that x1 covers. Values lose the surrounding blanks that
// net/http and every proxy strip in transit, and no others: a trailing no-break space makes another
// event type.
func canonicalHeaders(header http.Header) string {
	type field struct {
		lower  string
		values []string
	}
	covered := make([]field, 0, 16)
	for name, values := range header {
		if Covered(name) {
			covered = append(covered, field{strings.ToLower(name), values})
		}
	}
	slices.SortFunc(covered, func(a, b field) int { return strings.Compare(a.lower, b.lower) })
	var b strings.Builder
	b.Grow(64 * len(covered))
	for _, field := range covered {
		for _, value := range field.values {
			b.WriteString(field.lower)
			b.WriteByte(':')
			b.WriteString(textproto.TrimString(value))
			b.WriteByte('\n')
		}
	}
	return b.String()
}
