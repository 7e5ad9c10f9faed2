package lane

import "slices"

// weights are the shares of a lane that its classes get while all three have something to send.
// None starves.
var weights = [Classes]int{Live: 8, Backlog: 3, Replays: 1}

// A queue holds the runs of one class. A run is what is sent in sequence: one delivery or, of an
// ordering key, several.
type queue struct {
	runs   [][]Delivery
	head   int
	credit int // grows by the weight while others are served
	taken  int // claimed and not yet settled: queued, being sent, or waiting for the settler
	behind int // of those, in runs: they wait for the one before them, and for no sender
}

func (q *queue) empty() bool { return q.head == len(q.runs) }

func (q *queue) push(run []Delivery) {
	if q.head > len(q.runs)/2 { // moved to the front, so that a queue that never runs empty does not grow
		waiting := copy(q.runs, q.runs[q.head:])
		clear(q.runs[waiting:])
		q.runs, q.head = q.runs[:waiting], 0
	}
	q.runs = append(q.runs, run)
	q.taken += len(run)
	q.behind += len(run) - 1
}

func (q *queue) pop() []Delivery {
	run := q.runs[q.head]
	q.runs[q.head] = nil // release the payloads
	q.head++
	return run
}

// remove takes the run of an ordering key out of the queue; nil: it is not there.
func (q *queue) remove(key string) []Delivery {
	i := slices.IndexFunc(q.runs[q.head:], func(run []Delivery) bool {
		return run[0].Event.OrderingKey != nil && *run[0].Event.OrderingKey == key
	})
	if i < 0 {
		return nil
	}
	run := q.runs[q.head+i]
	q.runs = slices.Delete(q.runs, q.head+i, q.head+i+1)
	q.taken -= len(run)
	q.behind -= len(run) - 1
	return run
}
