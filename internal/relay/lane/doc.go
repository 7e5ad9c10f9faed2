// Package lane holds the deliveries of each destination on their way through a relay: what a lane
// has, what it may send, and how far claims have read. It touches no database and sends nothing.
//
//	delivery.go                      one event on its way to one destination
//	lanes.go                         all lanes: of many destinations most rest, and are found when something is due
//	lane.go, cursor.go, scan.go      one lane, and how far claims have read
//	outgoing*.go                     what a lane holds, and may send
//	order.go, queue.go, runs.go      ordering keys; the queues of a lane
package lane
