// Package control is what the API and the page share: a status that is read at most every two
// seconds, however many look at it, and bulk operations that are previewed, confirmed and run in
// the background.
package control
