package main

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
)

// keep leaves everything running until the play is interrupted.
func (p *play) keep() error {
	finance, logistics := p.stage.server.DSN(financeName), p.stage.server.DSN(logisticsName)
	psql := "psql"
	if _, err := exec.LookPath(psql); err != nil {
		psql = filepath.Join(p.stage.server.BinDir(), psql)
	}
	insert := `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.issued', '{"invoice":"MINE-1","customer":"me"}', 'MINE-1-issued')`
	p.print(p.bold("Everything still runs, without faults. Ctrl-C ends it. To play with:"))
	for _, line := range []struct{ what, command string }{
		{"look into finance", fmt.Sprintf("%s %s", psql, quote(finance))},
		{"look into logistics", fmt.Sprintf("%s %s", psql, quote(logistics))},
		{"enqueue an event by SQL", fmt.Sprintf("%s %s -c %s", psql, quote(finance), quote(insert))},
		{"see its effect", fmt.Sprintf("%s %s -c %s", psql, quote(logistics), quote("TABLE shipments ORDER BY id DESC LIMIT 5"))},
		{"ask for the status", fmt.Sprintf("OUTBOX_DATABASE_URL=%s %s status", quote(finance), p.Relay)},
	} {
		p.print("\n  " + p.dim("# "+line.what) + "\n  " + line.command)
	}
	p.print("\n  " + p.dim("# kill what you like; it is started again"))
	for _, u := range append([]*unit{p.stage.receiver}, p.relays...) {
		_, process := u.current()
		p.print(fmt.Sprintf("  kill -9 %d   %s", process.pid, p.dim("# "+u.role)))
	}
	p.print("")
	<-p.stage.ctx.Done()
	return nil
}

// quote quotes a word for a shell.
func quote(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }
