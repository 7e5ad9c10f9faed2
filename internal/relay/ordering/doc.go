// Package ordering holds the places of deliveries in their ordering keys, and up to where those are
// settled (floors.go). Nothing here is safe for concurrent use.
package ordering
