// Package join lets deliveries join their ordering keys when they are due.
// See docs/decisions/0072-an-event-joins-its-key-when-it-is-due.md.
package join
