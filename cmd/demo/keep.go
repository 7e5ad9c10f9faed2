package main

import (
	"fmt"
	"os/exec"
	"path/filepath"
)

// keep leaves everything running until the play is interrupted.
func (p *play) keep() {
	psql := "psql"
	if _, err := exec.LookPath(psql); err != nil {
		psql = filepath.Join(p.stage.server.BinDir(), psql)
	}
	p.print(p.bold("Everything still runs, without faults. Ctrl-C ends it. In another terminal:"))
	p.print(fmt.Sprintf("\n  FINANCE='%s'\n  LOGISTICS='%s'\n", p.stage.server.DSN(financeName), p.stage.server.DSN(logisticsName)))
	p.print(fmt.Sprintf("  %s \"$FINANCE\" -c \"INSERT INTO outbox (event_type, payload, idempotency_key)\n"+
		"    VALUES ('%s', json_build_object('invoice', 'MINE-1', 'customer', 'me'), 'MINE-1-issued')\"", psql, eventType))
	p.print(fmt.Sprintf("  %s \"$LOGISTICS\" -c \"TABLE shipments ORDER BY id DESC LIMIT 5\"", psql))
	p.print(fmt.Sprintf("  OUTBOX_DATABASE_URL=\"$FINANCE\" %s status\n", p.Relay))
	for _, u := range append([]*unit{p.stage.receiver}, p.relays...) {
		_, process := u.current()
		p.print(fmt.Sprintf("  kill -9 %-8d %s", process.PID, p.dim("# "+u.role+"; it is started again")))
	}
	p.print("")
	<-p.stage.ctx.Done()
}
