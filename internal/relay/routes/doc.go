// Package routes makes the stored routes those of all registered relays together (keeper.go), and
// gives what was parked before its route came to its destination (parked.go). A relay works through
// one [Keeper] and one [ParkedSearch].
package routes
