// Package agenda holds when the claimer acts, and why: its causes (agenda.go), how often it asks
// for new events (pace.go), when what was put off is due (retry_times.go), how long work beside
// delivering rests (rest.go), and whose turn it is where several relays claim (contention.go).
//
// Every method changes only its receiver, and takes the time as a parameter. Nothing here but
// RetryTimes is safe for concurrent use.
package agenda
