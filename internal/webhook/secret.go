package webhook

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"
)

const (
	secretPrefix   = "whsec_"
	minSecretBytes = 24
	maxSecretBytes = 64
)

// A Secret is one symmetric signing key. The zero value is no secret: [Sign] and [Verify] pass over
// it. It never prints itself: every formatting verb, JSON, text and log encoding yields a mask.
type Secret struct {
	// A pointer, because fmt calls no methods on unexported fields: printed as part of another
	// struct, a Secret shows an address instead of its key.
	key *string
}

// ParseSecret reads a secret as Standard Webhooks writes it: "whsec_" and 24 to 64 bytes in
// standard base64. The error says what is wrong without repeating the secret.
func ParseSecret(s string) (Secret, error) {
	encoded, ok := strings.CutPrefix(s, secretPrefix)
	if !ok {
		return Secret{}, errors.New(`a signing secret starts with "whsec_"; make one with: echo "whsec_$(openssl rand -base64 32)"`)
	}
	key, err := base64.StdEncoding.Strict().DecodeString(encoded)
	if err != nil || strings.ContainsAny(encoded, "\r\n") { // which the decoder passes over
		return Secret{}, errors.New(`what follows "whsec_" is not standard base64; make a secret with: echo "whsec_$(openssl rand -base64 32)"`)
	}
	if len(key) < minSecretBytes || len(key) > maxSecretBytes {
		return Secret{}, fmt.Errorf("the secret holds %d bytes; Standard Webhooks wants %d to %d", len(key), minSecretBytes, maxSecretBytes)
	}
	held := string(key)
	return Secret{key: &held}, nil
}

// ParseSecrets reads a comma-separated list of secrets, as used while rotating. Blanks around each
// are ignored; an empty string is no secrets. Errors name the position, counted from 1.
func ParseSecrets(list string) ([]Secret, error) {
	if strings.TrimSpace(list) == "" {
		return nil, nil
	}
	var secrets []Secret
	for i, s := range strings.Split(list, ",") {
		secret, err := ParseSecret(strings.TrimSpace(s))
		if err != nil {
			return nil, fmt.Errorf("secret %d: %w", i+1, err)
		}
		secrets = append(secrets, secret)
	}
	return secrets, nil
}

// ReconcilePurpose is the purpose of the secrets that questions to a receiver are signed with.
const ReconcilePurpose = "outbox-relay reconcile"

// For returns the secret that is derived for a purpose: HMAC-SHA256 of it under s. What one of them
// signs, the other does not verify, so a captured delivery is no question, and a question that
// reaches the wrong URL is no event. That of the zero Secret is zero.
func (s Secret) For(purpose string) Secret {
	if s.key == nil {
		return Secret{}
	}
	mac := hmac.New(sha256.New, []byte(*s.key))
	mac.Write([]byte(purpose))
	derived := string(mac.Sum(nil))
	return Secret{key: &derived}
}

const mask = secretPrefix + "***"

// IsZero reports whether the secret is unset.
func (s Secret) IsZero() bool { return s.key == nil }

// Equal reports whether both are the same key, or both none.
func (s Secret) Equal(other Secret) bool {
	if s.key == nil || other.key == nil {
		return s.key == other.key
	}
	return *s.key == *other.key
}

// Key returns the key itself, to look for it where it must not stand. Never print it. Empty: the
// secret is unset.
func (s Secret) Key() string {
	if s.key == nil {
		return ""
	}
	return *s.key
}

// String masks the secret.
func (s Secret) String() string { return mask }

// Format masks the secret for every verb. String alone would not: %d prints a struct's fields.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, mask) }

// MarshalText masks the secret for JSON, YAML and logs.
func (s Secret) MarshalText() ([]byte, error) { return []byte(mask), nil }
