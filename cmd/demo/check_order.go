package main

import "time"

// checkOrder wants, within each ordering key, ids in the order of the commits, no request for an event before the one
// before it was taken, and the effects in the same order.
func (f *facts) checkOrder() rule {
	r := rule{promise: "events of one ordering key arrive in the order in which they were committed"}
	seen, taken := map[string]time.Time{}, map[string]time.Time{}
	for _, req := range f.requests {
		earliest(seen, req.Key, req.At)
		if req.succeeded() {
			earliest(taken, req.Key, req.answeredAt)
		}
	}
	for _, keys := range f.inOrder {
		for i, key := range keys[1:] {
			before := keys[i]
			if f.invoices[key].Before(f.invoices[before]) {
				r.breach("%s was committed before %s, and has the larger id", key, before)
			}
			sent, posted := seen[key]
			if at, ok := taken[before]; posted && (!ok || sent.Before(at)) {
				r.breach("%s was POSTed before %s was taken", key, before)
			}
			if effects, earlier := f.effects[key], f.effects[before]; len(effects) > 0 && len(earlier) > 0 && effects[0].Before(earlier[0]) {
				r.breach("the effect of %s came before that of %s", key, before)
			}
		}
	}
	return r
}

// earliest notes a time if there is none before it.
func earliest(times map[string]time.Time, key string, at time.Time) {
	if known, ok := times[key]; !ok || at.Before(known) {
		times[key] = at
	}
}
