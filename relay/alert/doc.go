// Package alert sends people what needs one of them: its settings and the sending (alert.go), channels (channel.go), what an
// alert says (text.go), how it travels (transport.go), and the rows by which it is sent once across all relays (store.go).
//
// The rules are found elsewhere: by statements that settle, open a breaker or quarantine a relay, and by package watch. They
// write outbox_alert; a Sender sends what is due there.
package alert
