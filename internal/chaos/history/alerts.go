package history

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// alerted checks that no alert was sent twice without a cause.
func (c *checker) alerted() {
	for _, key := range slices.Sorted(maps.Keys(c.alerts)) {
		for i, p := range c.alerts[key] {
			if i+1 == len(c.alerts[key]) || c.undone(p) {
				continue
			}
			again := c.alerts[key][i+1]
			if !c.stoodStill(again.Who, p.At, again.At) { // a frozen relay sends what it had begun to send
				c.breach(Alerted, key, "was sent by %s at %s, and again by %s at %s", p.Who, p.At, again.Who, again.At)
			}
		}
	}
}

// told checks that what relays have noted as sent to people was sent. Each request is the reason of
// one note.
func (c *checker) told() {
	var sent []Call
	for _, alerts := range c.alerts {
		sent = append(sent, alerts...)
	}
	slices.SortFunc(sent, func(a, b Call) int { return cmp.Compare(a.At, b.At) })
	for _, note := range slices.SortedFunc(slices.Values(c.Told), func(a, b Told) int { return cmp.Compare(a.At, b.At) }) {
		i := slices.IndexFunc(sent, func(p Call) bool {
			return strings.HasPrefix(p.Key+" ", note.Rule+" "+note.State+" ") && p.At <= note.At+clockGrace && p.At >= note.At-alertGrace
		})
		if i >= 0 {
			sent = slices.Delete(sent, i, i+1)
		} else if len(c.Schedule) > 0 {
			c.breach(Untold, note.Rule, "is noted as sent (%s) at %s", note.State, note.At)
		}
	}
}
