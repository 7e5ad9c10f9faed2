// Command demo plays two services on a throwaway PostgreSQL: finance issues invoices, logistics ships, and outbox-relay
// carries every event from the one's database to the other's, while relays and the receiver are killed.
//
//	finance ──tx──▶ [finance: invoices, outbox] ◀── outbox-relay ×2 ──POST──▶ logistics ──tx──▶ [logistics: shipments, processed_events]
//
// Each of them is a process of its own: the relays are the real binary, the services are this program under another
// first argument. In the end the two databases are compared, and every request on the wire is accounted for.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

func main() {
	os.Exit(realMain(os.Args[1:]))
}

// realMain runs the role that the first argument names, or the demo. The tests' binary calls it too.
func realMain(args []string) int {
	if len(args) > 0 {
		switch args[0] {
		case financeName:
			return runRole(&financeRole{}, args)
		case logisticsName:
			return runRole(&logisticsRole{}, args)
		}
	}
	return runDemo(args)
}

// A role is the part of one process.
type role interface {
	Run(ctx context.Context) error
}

// runRole plays a service until it ends. It needs no regard for signals: it writes nothing that its death would leave
// half done.
func runRole(r role, args []string) int {
	parser, err := kong.New(r, kong.Name(args[0]))
	if err == nil {
		_, err = parser.Parse(args[1:])
	}
	if err == nil {
		err = r.Run(context.Background())
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
}

// helpShown ends runDemo after --help, where kong would end the process.
type helpShown struct{}

func runDemo(args []string) (code int) {
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(helpShown); !ok {
				panic(r)
			}
		}
	}()
	var o options
	parser, err := kong.New(&o, kong.Name("demo"), kong.Description(description), kong.Exit(func(int) { panic(helpShown{}) }))
	if err == nil {
		_, err = parser.Parse(args)
	}
	if err == nil && o.Events < 100 {
		err = fmt.Errorf("--events %d: write at least 100", o.Events)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v; see: demo --help\n", err)
		return exitUsage
	}

	clearEnvironment()
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
