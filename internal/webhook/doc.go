// Package webhook is the wire contract that the relay and its receivers share: header names,
// secrets, the two signatures of a POST, and the answers that refuse it.
//
// A signed request carries the three headers of Standard Webhooks 1.0.0
// (https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md), so
// that any library of that standard verifies it. That signature, v1, is HMAC-SHA256 over
// "id.timestamp.body". It cannot contain the idempotency key, which may hold dots, and leaves every
// other header open: the captor of a request could send it again under another key or event type.
// Hence two additions:
//
//   - webhook-id is derived from the key ([DeriveID]), so that a verified id binds the key;
//   - a second signature, x1, also covers X-Idempotency-Key and every header that begins with
//     X-Outbox-, X-Event- or Ce-.
package webhook
