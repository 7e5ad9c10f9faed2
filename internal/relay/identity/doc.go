// Package identity keeps relays away from copies of their database. A relay records which database
// it works on. One that finds itself on another, such as a restored dump, claims and sends nothing
// until an operator decides: the events that are pending there may be those that the original
// delivers.
package identity
