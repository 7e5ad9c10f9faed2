// Package status says how the outbox is: the commands status, relays and doctor.
package status
