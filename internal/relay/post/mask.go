package post

import (
	"encoding/base64"
	"encoding/hex"
	"net/http"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/mask"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// maskOf returns the mask of a request: every header that is not part of the wire contract, the
// query, the proxy's credential and the signing secrets.
func maskOf(e *Endpoint, header http.Header) *mask.Mask {
	m := &mask.Mask{}
	for name, values := range header {
		if isPublicHeader(name, e.Destination.Wire.Format) {
			continue
		}
		for _, value := range values {
			m.AddHeader(value)
		}
	}
	for _, secret := range e.Destination.SigningSecrets {
		if key := secret.Key(); key != "" {
			m.Add(key, base64.StdEncoding.EncodeToString([]byte(key)), hex.EncodeToString([]byte(key)))
		}
	}
	m.AddURL(e.URL)
	if proxy, err := e.Destination.Wire.proxyURL(); err == nil && proxy != nil {
		m.AddURL(proxy)
	}
	return m
}

// isPublicHeader reports whether a header's value is the relay's own and no secret.
func isPublicHeader(name string, format Format) bool {
	switch name {
	case webhook.Signature:
		return false
	case "Content-Type", "User-Agent", webhook.ID, webhook.Timestamp, webhook.IdempotencyKey:
		return true
	}
	return strings.HasPrefix(name, webhook.OutboxPrefix) || format == FormatCloudEvents && isAttribute(name)
}
