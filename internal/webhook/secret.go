package webhook

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

const (
	secretPrefix   = "whsec_"
	minSecretBytes = 24
	maxSecretBytes = 64
)

// A Secret is one symmetric signing key. The zero value is no secret. It never prints itself: every formatting verb,
// JSON and text encoding yields a mask.
type Secret struct {
	key string
}

// ParseSecret reads a secret as Standard Webhooks writes it: "whsec_" and 24 to 64 bytes in standard base64. The error
// says what is wrong without repeating the secret.
func ParseSecret(s string) (Secret, error) {
	encoded, ok := strings.CutPrefix(s, secretPrefix)
	if !ok {
		return Secret{}, errors.New(`a signing secret starts with "whsec_"; make one with: echo "whsec_$(openssl rand -base64 32)"`)
	}
	key, err := base64.StdEncoding.Strict().DecodeString(encoded)
	if err != nil {
		return Secret{}, errors.New(`what follows "whsec_" is not standard base64; make a secret with: echo "whsec_$(openssl rand -base64 32)"`)
	}
	if len(key) < minSecretBytes || len(key) > maxSecretBytes {
		return Secret{}, fmt.Errorf("the secret holds %d bytes; Standard Webhooks wants %d to %d", len(key), minSecretBytes, maxSecretBytes)
	}
	return Secret{key: string(key)}, nil
}

// ParseSecrets reads a comma-separated list of secrets, as used while rotating. Blanks around each are ignored; an
// empty string is no secrets. Errors name the position, counted from 1.
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

// IsZero reports whether the secret is unset.
func (s Secret) IsZero() bool { return s.key == "" }

// String masks the secret.
func (s Secret) String() string { return "whsec_***" }

// GoString masks the secret for %#v.
func (s Secret) GoString() string { return `webhook.Secret("whsec_***")` }

// MarshalText masks the secret for JSON, YAML and logs.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
