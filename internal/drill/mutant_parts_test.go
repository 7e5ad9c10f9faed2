package drill

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// seen reports whether the receiver remembers a key.
func (rc *receiver) seen(ctx context.Context, key string) bool {
	var n int
	err := rc.pool.QueryRow(ctx, "SELECT count(*) FROM (TABLE memory UNION ALL TABLE loose) m WHERE receiver = $1 AND key = $2", rc.name, key).Scan(&n)
	return err == nil && n > 0
}

// keyed lets the receiver remember events by another key. The effect is that of the right one.
func (rc *receiver) keyed(key func(r *http.Request, body []byte) string) {
	right := rc.once
	rc.key = key
	rc.once = func(ctx context.Context, rc *receiver, w http.ResponseWriter, r *http.Request, key string, hash []byte) (int, error) {
		return right(context.WithValue(ctx, effectKey{}, r.Header.Get(webhook.IdempotencyKey)), rc, w, r, key, hash)
	}
}

// signed verifies x1 and not the time.
func (rc *receiver) signed(h http.Header, body []byte) error {
	seconds, err := strconv.ParseInt(h.Get(webhook.Timestamp), 10, 64)
	if err != nil {
		return err
	}
	verified, err := webhook.Verify(h, body, time.Unix(seconds, 0), tolerance, rc.secrets...)
	if err == nil && verified != webhook.VerifiedX1 {
		err = webhook.ErrSignature
	}
	return err
}

// within lets the receiver decide otherwise which times it tolerates.
func (rc *receiver) within(tolerates func(by time.Duration) bool) {
	rc.verify = func(h http.Header, body []byte) error {
		seconds, err := strconv.ParseInt(h.Get(webhook.Timestamp), 10, 64)
		if err != nil || !tolerates(time.Until(time.Unix(seconds, 0))) {
			return webhook.ErrTooOld
		}
		return rc.signed(h, body)
	}
}

// lookingAt lets the receiver look at some signatures alone.
func (rc *receiver) lookingAt(some func([]string) []string) {
	right := rc.verify
	rc.verify = func(h http.Header, body []byte) error {
		looked := h.Clone()
		looked.Set(webhook.Signature, strings.Join(some(strings.Fields(h.Get(webhook.Signature))), " "))
		return right(looked, body)
	}
}

// unknowing lets the receiver answer a status to events whose header has another value.
func (rc *receiver) unknowing(name, value string, status int) {
	right := rc.handles
	rc.handles = func(h http.Header) int {
		if h.Get(name) != value {
			return status
		}
		return right(h)
	}
}
