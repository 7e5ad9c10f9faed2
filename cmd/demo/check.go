package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// A rule is one promise, and every way in which the facts break it.
type rule struct {
	promise string
	broken  []string
}

func (r *rule) breach(format string, args ...any) {
	r.broken = append(r.broken, fmt.Sprintf(format, args...))
}

// check holds the facts against what outbox-relay promises. It decides by the databases and the wire, not by what
// anybody believes to have done.
func (f *facts) check() []rule {
	rules := []rule{f.checkEffects(), f.checkRolledBack(), f.checkDelivered(), f.checkMemory(), f.checkRequests(), f.checkOrder()}
	for i := range rules {
		slices.Sort(rules[i].broken)
	}
	return rules
}

func (f *facts) checkEffects() rule {
	r := rule{promise: "every committed invoice has exactly one shipment"}
	for key := range f.invoices {
		switch n := len(f.effects[key]); {
		case n == 0:
			r.breach("lost: %s is committed and has no shipment", key)
		case n > 1:
			r.breach("doubled: %s has %d shipments", key, n)
		}
	}
	return r
}

func (f *facts) checkRolledBack() rule {
	r := rule{promise: "nothing was ever seen of an invoice that was rolled back"}
	for _, key := range f.rolledBack {
		if _, ok := f.invoices[key]; ok {
			r.breach("%s was rolled back and is an invoice", key)
		}
		if _, ok := f.events[key]; ok {
			r.breach("%s was rolled back and has an event", key)
		}
	}
	for key := range f.effects {
		if _, ok := f.invoices[key]; !ok {
			r.breach("%s is no committed invoice and has a shipment", key)
		}
	}
	for _, req := range f.requests {
		if _, ok := f.events[req.Key]; !ok {
			r.breach("%s is no committed event and was POSTed", req.Key)
		}
	}
	return r
}

func (f *facts) checkDelivered() rule {
	r := rule{promise: "every committed event is marked delivered, once"}
	for key := range f.invoices {
		switch e, ok := f.events[key]; {
		case !ok:
			r.breach("%s has no event", key)
		case e.deliveries != 1:
			r.breach("%s has %d deliveries", key, e.deliveries)
		case e.status != "delivered":
			r.breach("%s is %s", key, e.status)
		}
	}
	return r
}

func (f *facts) checkMemory() rule {
	r := rule{promise: "processed_events and shipments hold the same keys"}
	for key := range f.processed {
		if !f.shipped[key] {
			r.breach("%s is processed and not shipped", key)
		}
	}
	for key := range f.shipped {
		if !f.processed[key] {
			r.breach("%s is shipped and not processed", key)
		}
	}
	return r
}

// lastBreath is before a receiver's death, or before the relay's patience ended: an answer that the receiver was about to
// write then may not have got there.
const lastBreath = time.Second

// checkRequests wants a recorded cause for every request that is not the one that delivered its event: a fault of the
// receiver that the relay's attempt log agrees with, or the death of the relay whose claim it was.
func (f *facts) checkRequests() rule {
	r := rule{promise: "every request on the wire is explained, and every attempt counted"}
	delivering := map[string]int{}
	seen := map[string]bool{}
	for _, req := range f.requests {
		e, ok := f.events[req.Key]
		if !ok {
			continue // told by checkRolledBack
		}
		if seen[req.Delivery] {
			r.breach("%s: %s was POSTed twice under one claim", req.Key, req.Delivery)
		}
		seen[req.Delivery] = true
		failure, failed := f.failed[req.Delivery]
		life, lost := f.lost[req.Delivery]
		_, wasKilled := f.kills[life]
		switch {
		case e.status == "delivered" && req.Delivery == e.delivery:
			delivering[req.Key]++
			if !req.succeeded() || req.Fault == faultLose {
				r.breach("%s: delivered by %s, which was not answered 2xx", req.Key, req.Delivery)
			}
		case failed && !f.explains(&req, failure):
			r.breach("%s: %s was answered %d, yet the relay says %s", req.Key, req.Delivery, req.status, failure.reason)
		case !failed && lost && !wasKilled:
			r.breach("%s: %s lost its claim %s, and it was not killed", req.Key, life, req.Delivery)
		case !failed && !lost:
			r.breach("%s: %s is an extra request without a cause", req.Key, req.Delivery)
		}
		if req.succeeded() {
			if at := f.effects[req.Key]; len(at) == 0 || at[0].After(req.answeredAt) {
				r.breach("%s: %s was answered %d before its effect was committed", req.Key, req.Delivery, req.status)
			}
		}
	}
	failures, uncounted := map[string]int{}, map[string]int{}
	for delivery, failure := range f.failed {
		if failure.held {
			continue
		}
		failures[eventOf(delivery)]++
		if _, lost := f.lost[delivery]; lost {
			// The dead relay's last settle was still on its way when its claim was another's: it logs, and may count no more.
			uncounted[eventOf(delivery)]++
		}
	}
	for key, e := range f.events {
		if e.status != "delivered" {
			continue // told by checkDelivered
		}
		if delivering[key] == 0 {
			r.breach("%s: delivered by %s, which was never on the wire", key, e.delivery)
		}
		made := failures[eventOf(e.delivery)] + 1
		if e.attempts > made || e.attempts < made-uncounted[eventOf(e.delivery)] {
			r.breach("%s: %d attempts are counted, %d were made", key, e.attempts, made)
		}
	}
	return r
}

// explains reports whether what the receiver's side knows of a request is why it failed in the relay's eyes.
func (f *facts) explains(req *request, failure failure) bool {
	died, dead := f.deaths[req.receiver]
	switch {
	case !req.succeeded():
		return true // another status, or none
	case req.Fault == faultLose, req.Fault == faultLate:
		return true
	case failure.reason == "timeout":
		return failure.ended.Sub(req.answeredAt) < lastBreath
	default:
		return dead && died.Sub(req.answeredAt) < lastBreath
	}
}

func (r *request) succeeded() bool { return r.status >= 200 && r.status <= 299 }

// eventOf returns the event's part of a delivery id, which is event-destination-claim.
func eventOf(delivery string) string {
	id, _, _ := strings.Cut(delivery, "-")
	return id
}
