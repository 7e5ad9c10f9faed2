package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/process"
)

// thousands writes a number for people: 12,345.
func thousands(n int) string { return plain.Thousands(strconv.Itoa(n)) }

// short writes a duration for people: 7 ms, 1.3 s.
func short(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// maxBreaches is how many breaches of one promise are listed.
const maxBreaches = 5

// report prints what the play came to, and whether every promise was kept.
func (p *play) report(f figures, rules []rule) {
	process.PrintTable(p.Writer(), [][3]string{
		{"invoices committed", thousands(f.Committed), "each with its event, in one transaction"},
		{"invoices rolled back", thousands(f.RolledBack), "with theirs"},
		{"requests (POSTs) on the wire", thousands(f.Posts)},
		{"  of these retries", thousands(f.Retries), "of an event that had been sent before"},
		{"  of these duplicates, suppressed", thousands(f.Suppressed), "it had been processed: answered from storage"},
		{"effects (shipments)", thousands(f.Effects)},
		{"lost", thousands(f.Lost), "committed and never shipped"},
		{"doubled", thousands(f.Doubled), "shipped more than once"},
		{"relays killed (kill -9)", thousands(f.RelaysKilled), "their claims taken over within " + short(p.slowest)},
		{"receiver killed (kill -9)", thousands(f.ReceiversKilled), "after its commit, before its answer"},
		{"answers late, failed, lost", fmt.Sprintf("%d, %d, %d", f.Late, f.Refused, f.AnswersLost), "late: some beyond the relay's timeout"},
		{"latency p50", short(f.P50), "from commit in finance to commit in logistics"},
		{"latency p99", short(f.P99), "with all faults and retries"},
	})
	p.Printf("\nChecked in both databases and on the wire")
	for _, r := range rules {
		verdict := "kept  "
		if len(r.broken) > 0 {
			verdict = "BROKEN"
		}
		p.Printf("  %s  %s", verdict, r.promise)
		for _, breach := range r.broken[:min(len(r.broken), maxBreaches)] {
			p.Printf("          %s", breach)
		}
		if more := len(r.broken) - maxBreaches; more > 0 {
			p.Printf("          … and %s more", thousands(more))
		}
	}
	p.Print()
}
