package post

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
)

// digestBytes are so few that a digest tells next to nothing of a secret, whoever tries all that it
// may be.
const digestBytes = 2

// Digests returns two short digests of a destination with its defaults, by which relays that have
// other settings or other secrets are found. What a file says is taken as it is now.
func (d Destination) Digests(salt string) (settings, secrets string) {
	w := d.Wire
	jitter := 0.0
	if d.Retry.Jitter != nil {
		jitter = *d.Retry.Jitter
	}
	var certificate [][]byte
	if w.TLS.Certificate != nil {
		if shown := w.TLS.Certificate(); shown != nil {
			certificate = shown.Certificate
		}
	}
	settings = digest(salt,
		d.URL, d.Timeout, d.MaxInFlight, d.RateLimit, d.Retry.Schedule, d.Retry.MaxAttempts, jitter, d.Retry.RetryAfterMax, d.Retry.NotAfter,
		d.Breaker, d.OnFailure, d.Responses, slices.Sorted(maps.Keys(d.Headers)), w.Format, w.Source, w.MaxPayloadBytes, w.Excerpts, w.EventHeaders,
		w.TLS.MinVersion, w.TLS.ServerName, w.TLS.Roots != nil, certificate, d.NATS.Subject, d.NATS.Partitions, d.NATS.Stream, d.NATS.InboxPrefix,
		d.Kafka.Topic, d.Kafka.Key, d.Kafka.Mechanism, d.Batch)
	held := []any{d.Headers, w.Proxy} // a proxy may have a password
	for _, secret := range d.SigningSecrets {
		held = append(held, secret.Key())
	}
	for _, current := range []func() string{w.Authorization, d.NATS.Credentials, d.NATS.Seed} {
		if current != nil {
			held = append(held, current())
		}
	}
	return settings, digest(salt, held...)
}

func digest(salt string, values ...any) string {
	h := hmac.New(sha256.New, []byte(salt))
	for _, value := range values {
		fmt.Fprintf(h, "%q,", fmt.Sprint(value))
	}
	return hex.EncodeToString(h.Sum(nil)[:digestBytes])
}
