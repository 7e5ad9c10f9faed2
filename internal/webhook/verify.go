package webhook

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Reasons for which [Verify] refuses a request.
var (
	ErrUnsigned   = errors.New("the request is not signed: webhook-id, webhook-timestamp or webhook-signature is missing or repeated")
	ErrSignature  = errors.New("no signature matches: the secret differs, or the request was changed on its way")
	ErrID         = errors.New("webhook-id contains a dot, which Standard Webhooks forbids: the signed text would be ambiguous")
	ErrTimestamp  = errors.New("webhook-timestamp is not a Unix time in seconds")
	ErrTooOld     = errors.New("webhook-timestamp is too far in the past")
	ErrTooNew     = errors.New("webhook-timestamp is too far in the future")
	ErrKeyUnbound = errors.New("webhook-id does not belong to X-Idempotency-Key")
)

// Verified tells how a request proved itself.
type Verified int

const (
	// VerifiedV1 covers id, timestamp and body: a Standard Webhooks sender. No other header may be
	// trusted.
	VerifiedV1 Verified = iota + 1
	// VerifiedX1 also covers every [Covered] header: an outbox-relay.
	VerifiedX1
)

// Verify checks a received request against every secret and returns how much of it is proven. now
// is the receiver's clock; a timestamp further away than tolerance, in either direction, is
// refused. Comparison takes constant time. Without secrets nothing verifies.
func Verify(header http.Header, body []byte, now time.Time, tolerance time.Duration, secrets ...Secret) (Verified, error) {
	if err := Precheck(header, now, tolerance); err != nil {
		return 0, err
	}
	id, timestamp, signature := header.Get(ID), header.Get(Timestamp), header.Get(Signature)
	if strings.Contains(signature, "x1,") {
		covered := canonicalHeaders(header)
		for _, secret := range secrets {
			if !secret.IsZero() && offers(signature, "x1", signX1(secret, id, timestamp, covered, body)) {
				return boundX1(header, id)
			}
		}
	}
	if strings.Contains(signature, "v1,") {
		for _, secret := range secrets {
			if !secret.IsZero() && offers(signature, "v1", signV1(secret, id, timestamp, body)) {
				return VerifiedV1, nil
			}
		}
	}
	return 0, ErrSignature
}

// Precheck returns the error of [Verify] for a request that no body can make valid: one without a
// signature, or not of this time, or whose signature does not have the form of one. A receiver asks
// before it reads the body.
func Precheck(header http.Header, now time.Time, tolerance time.Duration) error {
	id, okID := single(header, ID)
	timestamp, okTimestamp := single(header, Timestamp)
	signature, okSignature := single(header, Signature)
	if !okID || !okTimestamp || !okSignature {
		return ErrUnsigned
	}
	if strings.Contains(id, ".") {
		return ErrID
	}
	seconds, err := strconv.ParseInt(timestamp, 10, 64)
	if err != nil {
		return ErrTimestamp
	}
	// Compared in seconds, without subtracting: a timestamp near the ends of int64 would overflow
	// into the present.
	if seconds < now.Add(-tolerance).Unix() {
		return ErrTooOld
	}
	if seconds > now.Add(tolerance).Unix() {
		return ErrTooNew
	}
	for entry := range strings.FieldsSeq(signature) {
		if version, encoded, _ := strings.Cut(entry, ","); (version == "x1" || version == "v1") && len(encoded) == encodedBytes {
			return nil
		}
	}
	return ErrSignature
}

// boundX1 refuses an id that was not derived from the key beside it.
func boundX1(header http.Header, id string) (Verified, error) {
	key, ok := single(header, IdempotencyKey)
	if !ok || DeriveID(key) != id {
		return 0, ErrKeyUnbound
	}
	return VerifiedX1, nil
}

var derivedID = regexp.MustCompile(`^(evt_[0-9a-f]{32}|bat_[A-Z2-7]{26})$`)

// IsDerivedID reports whether id has the form that [DeriveID] or [Signer.SignBatch] gives. A
// request with such an id and no valid x1 is a relay's request stripped of its stronger signature,
// not one of a foreign sender.
func IsDerivedID(id string) bool { return derivedID.MatchString(id) }

// single returns the header's only value. A header that is repeated has no one value that both
// sides agree on.
func single(header http.Header, name string) (string, bool) {
	values := header[name]
	if len(values) != 1 || values[0] == "" {
		return "", false
	}
	return values[0], true
}

// encodedBytes is the length of a signature in base64.
const encodedBytes = (sha256.Size + 2) / 3 * 4

// offers reports whether a list of signatures holds this one, under the version. Other versions are
// skipped, as the standard demands. The list may be as long as a header can be: an entry costs one
// comparison, and no memory.
func offers(list, version string, signature []byte) bool {
	var want, got [encodedBytes]byte
	base64.StdEncoding.Encode(want[:], signature)
	found := false
	for entry := range strings.FieldsSeq(list) {
		named, encoded, _ := strings.Cut(entry, ",")
		if named == version && len(encoded) == encodedBytes {
			copy(got[:], encoded)
			found = hmac.Equal(got[:], want[:]) || found
		}
	}
	return found
}
