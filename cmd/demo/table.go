package main

import "fmt"

// maxBreaches is how many breaches of one promise are listed.
const maxBreaches = 5

// table prints what a play came to, and whether every promise was kept.
func (n *narrator) table(f figures, slowest takeover, rules []rule) {
	row := func(what, figure, remark string) {
		line := fmt.Sprintf("  %-36s %13s", what, figure)
		if remark != "" {
			line += "   " + n.dim(remark)
		}
		n.print(line)
	}
	n.print("")
	n.print(n.bold("What happened"))
	row("invoices committed", count(f.committed), "each with its event, in one transaction")
	row("invoices rolled back", count(f.rolledBack), "with theirs")
	row("requests (POSTs) on the wire", count(f.posts), "")
	row("  of these retries", count(f.retries), "of an event that had been sent before")
	row("  of these duplicates, suppressed", count(f.suppressed), "it had been processed: answered from storage")
	row("effects (shipments)", count(f.effects), "")
	row("lost", count(f.lost), "committed and never shipped")
	row("doubled", count(f.doubled), "shipped more than once")
	row("relays killed (kill -9)", count(f.relaysKilled), fmt.Sprintf("their claims taken over within %s", short(slowest.took)))
	row("receiver killed (kill -9)", count(f.receiversKilled), "after its commit, before its answer")
	row("answers late, failed, lost", fmt.Sprintf("%d, %d, %d", f.late, f.refused, f.answersLost), "late: some beyond the relay's timeout")
	row("latency p50", short(f.p50), "from commit in finance to commit in logistics")
	row("latency p99", short(f.p99), "with all faults and retries")
	n.print("")
	n.print(n.bold("Checked in both databases and on the wire"))
	for _, r := range rules {
		if len(r.broken) == 0 {
			n.print("  " + n.green("kept  ") + "  " + r.promise)
			continue
		}
		n.print("  " + n.red("BROKEN") + "  " + r.promise)
		for i, breach := range r.broken {
			if i == maxBreaches {
				n.print(fmt.Sprintf("          … and %s more", count(len(r.broken)-maxBreaches)))
				break
			}
			n.print("          " + breach)
		}
	}
	n.print("")
}
