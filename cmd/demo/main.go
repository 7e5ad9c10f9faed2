// Command demo plays two services on a throwaway PostgreSQL: finance issues invoices, logistics
// ships, and outbox-relay carries every event from the one's database to the other's, while relays
// and the receiver are killed.
//
//	finance ─▶ [invoices, outbox] ◀─ outbox-relay ×2 ─▶ network ─▶ logistics ─▶ [shipments, processed_events]
//
// Each of them is its own process: the relays are the real binary, the services are this
// program under another first argument. The network is this process, which delays and loses
// answers. In the end both databases are compared, and every request is accounted for.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/outbox-relay/outbox-relay/internal/process"
)

func main() {
	os.Exit(realMain(os.Args[1:]))
}

// The two services, their roles and their databases.
const (
	financeName   = "finance"
	logisticsName = "logistics"
)

// realMain runs the role that the first argument names, or the demo. The tests' binary calls it
// too. Roles need no regard for signals: they write nothing that their death would leave half done.
func realMain(args []string) int {
	var err error
	switch {
	case len(args) == 2 && args[0] == financeName:
		var o order
		if err = json.Unmarshal([]byte(args[1]), &o); err == nil {
			err = o.Run(context.Background())
		}
	case len(args) > 0 && args[0] == logisticsName:
		var role logisticsRole
		if _, err = kong.Must(&role, kong.Name(logisticsName)).Parse(args[1:]); err == nil {
			err = role.Run(context.Background())
		}
	default:
		return runDemo(args)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFailed
	}
	return 0
}

// Exit codes, the same as those of outbox-relay.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

const description = `Finance issues invoices, logistics ships, outbox-relay carries every event from the one's database to the other's.
Relays and the receiver are killed on the way; in the end both databases are compared. It needs PostgreSQL's programs
(initdb, postgres) on this machine, takes about 20 seconds and leaves nothing behind.`

// options are the command line.
type options struct {
	Relay  string `default:"bin/outbox-relay" placeholder:"FILE" help:"The outbox-relay to play with. Default: bin/outbox-relay."`
	Events int    `default:"3000" placeholder:"3000" help:"Invoices that finance issues, about a tenth of which it rolls back."`
	Seed   uint64 `placeholder:"N" help:"Repeats the invoices and faults of a run that printed this seed. Default: a new one."`
	Keep   bool   `help:"Leave everything running afterwards, to play with, until Ctrl-C."`

	// The tempo leaves time to read along.
	Steady  time.Duration `hidden:"" default:"13s"`  // over which the even pace is kept
	Pause   time.Duration `hidden:"" default:"3s"`   // before each act
	Absence time.Duration `hidden:"" default:"1.5s"` // of a killed relay
}

func runDemo(args []string) (code int) {
	var o options
	_, err := kong.Must(&o, kong.Name("demo"), kong.Description(description)).Parse(args)
	if err == nil && o.Events < 100 {
		err = fmt.Errorf("--events %d: write at least 100", o.Events)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v; see: demo --help\n", err)
		return exitUsage
	}
	process.ClearEnvironment()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// A second signal ends this process at once; what it has started goes by itself then.
	defer context.AfterFunc(ctx, stop)()
	if err := newPlay(o, os.Stdout).run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		if ctx.Err() != nil {
			return exitInterrupted
		}
		return exitFailed
	}
	return 0
}
