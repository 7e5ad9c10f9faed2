// Package chaos proves the promises under faults: producers, relays and receivers work on a real
// PostgreSQL over real TCP, while faults that a seed chooses hit each of them. Afterwards package
// history judges what was recorded. It holds tests alone.
//
//	chaos_test.go     the tests: without faults, and with faults at random
//	stage_test.go     who takes part: the databases, relays and receivers as processes, links between them
//	producer_test.go  transactions with events: committed, rolled back, held open
//	receiver_test.go  a receiving service, in its own process
//	inbox_test.go     the same while receivers record events and work them later, and what their handlers do
//	wire_test.go      what the relays' requests pass: records each, and tampers with some
//	link_test.go      a TCP proxy that delays, resets, swallows, slices or cuts, loses the answer to a COMMIT, or meets a doom at one message
//	killpoint_test.go each message of a relay, and each stage of its requests: the relay dies there, stands still, or is cut off
//	command_test.go   each message of a migration and of the archive, likewise
//	nth_test.go       each message of a receiver to its database fails once
//	refusal_test.go   each statement of a relay, and of a receiver, is refused once
//	disk_linux_test.go, clock_linux_test.go, names_linux_test.go   a full disk, a clock that jumps, names that are not found
//	faults_test.go    the faults
//	aged_test.go      what a database holds after a long time
//	tables_test.go    what both databases hold at the end
//	afterwards_test.go what relays hold then: connections, descriptors, memory, metrics, logs
package chaos
