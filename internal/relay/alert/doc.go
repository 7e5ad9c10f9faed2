// Package alert sends people what needs one of them: its settings and the sending (alert.go),
// channels (channel.go), what an alert says (rules.go, text.go), how it travels (transport.go), and
// the rows by which it is sent once across all relays (store.go).
//
// When a rule holds is found elsewhere: by package watch, and by statements that settle, open a
// breaker, change routes or quarantine a relay. They write outbox_alert; a Sender sends what is due
// there.
package alert
