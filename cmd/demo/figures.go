package main

import (
	"slices"
	"time"
)

// figures are what a play comes to.
type figures struct {
	committed, rolledBack         int
	posts, retries, suppressed    int
	late, refused, answersLost    int
	effects, lost, doubled        int
	relaysKilled, receiversKilled int
	p50, p99                      time.Duration // from the commit in finance to the commit in logistics
}

func (f *facts) figures() figures {
	n := figures{
		committed: len(f.invoices), rolledBack: len(f.rolledBack), posts: len(f.requests),
		relaysKilled: len(f.kills), receiversKilled: len(f.deaths),
	}
	keys := map[string]bool{}
	for _, req := range f.requests {
		keys[req.Key] = true
		if req.replayed {
			n.suppressed++
		}
		switch {
		case req.Fault == faultLate:
			n.late++
		case req.Fault == faultRefuse && req.status == 500:
			n.refused++
		case req.Fault == faultLose && req.succeeded():
			n.answersLost++
		}
	}
	n.retries = n.posts - len(keys)
	var latencies []time.Duration
	for key, committed := range f.invoices {
		at := f.effects[key]
		if len(at) == 0 {
			n.lost++
			continue
		}
		latencies = append(latencies, at[0].Sub(committed))
	}
	for _, at := range f.effects {
		n.effects += len(at)
		n.doubled += len(at) - 1
	}
	slices.Sort(latencies)
	if last := len(latencies) - 1; last >= 0 {
		n.p50, n.p99 = latencies[last/2], latencies[last*99/100]
	}
	return n
}
