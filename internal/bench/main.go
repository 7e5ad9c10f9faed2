// Command bench measures outbox-relay beside its peers on this machine: a bare HTTP client, River,
// and the textbook outbox. Every system delivers the same requests to the same receiver, each in a
// process of its own, from a throwaway PostgreSQL with fsync on. The systems take turns in each
// round, so that a busy moment of the machine hits all of them.
//
//	make bench                              everything, which takes hours
//	make bench RUN=drain,latency ROUNDS=3   some workloads; make bench RUN=list names them
//	bin/bench -run drain -beside OTHER      this build of outbox-relay and another one in turns, and the ratio of all metrics
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the flags of a run.
type options struct {
	run     string
	rounds  int
	quick   bool
	events  int
	settled int
	seconds int
	relay   string
	beside  string
	alone   bool
	cases   string
	docs    string
}

func run(ctx context.Context, args []string) error {
	if len(args) > 1 && args[0] == "role" {
		return playRole(ctx, args[1], args[2:])
	}
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.run, "run", "", "workloads to run, separated by commas; empty: all, list: name them")
	flags.IntVar(&o.rounds, "rounds", 5, "how often each system runs each case")
	flags.BoolVar(&o.quick, "quick", false, "one short round of the last case of each workload, which shows that it works and measures nothing")
	flags.IntVar(&o.events, "events", 100_000, "events of a drain")
	flags.IntVar(&o.settled, "settled", 5_000_000, "settled events that the workload settled puts before the others")
	flags.IntVar(&o.seconds, "seconds", 10, "how long a rate, or a load of inserts, lasts")
	flags.StringVar(&o.relay, "relay", "bin/outbox-relay", "the program to measure")
	flags.StringVar(&o.beside, "beside", "", "another build of outbox-relay, to measure in turns with the first and nothing else")
	flags.BoolVar(&o.alone, "alone", false, "measure outbox-relay alone, without the other systems")
	flags.StringVar(&o.cases, "cases", "", "regular expression of the cases to run; empty: all")
	flags.StringVar(&o.docs, "docs", "", "directory of performance.md, into which tables are written; empty: print only")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.quick {
		o.rounds, o.events, o.settled, o.seconds = 1, 500, 1000, 1
	}
	if o.rounds < 1 || o.events < 10 || o.seconds < 1 || o.settled < 0 {
		return errors.New("rounds, events and seconds must be positive; a drain has at least 10 events")
	}
	all := workloads(o)
	if o.run == "list" {
		for _, w := range all {
			fmt.Printf("%-10s %s\n", w.name, w.title)
		}
		return nil
	}
	chosen, err := chosenBy(o, all)
	if err != nil {
		return err
	}
	return measureAll(ctx, o, chosen)
}

// chosenBy returns what the options leave of all workloads.
func chosenBy(o options, all []workload) ([]workload, error) {
	chosen, err := choose(all, o.run)
	if err != nil {
		return nil, err
	}
	if o.docs != "" && (o.beside != "" || o.alone || o.cases != "") {
		return nil, errors.New("a part of a workload is not published: leave out -docs, or -beside, -alone and -cases")
	}
	if o.cases != "" {
		named, err := regexp.Compile(o.cases)
		if err != nil {
			return nil, fmt.Errorf("-cases: %w", err)
		}
		if chosen, err = onlyCases(chosen, named.MatchString); err != nil {
			return nil, err
		}
	}
	switch {
	case o.beside != "":
		return besideOther(chosen, o.beside)
	case o.alone:
		return onlyOurs(chosen), nil
	}
	return chosen, nil
}

func choose(all []workload, names string) ([]workload, error) {
	if names == "" {
		return all, nil
	}
	var chosen []workload
	for name := range strings.SplitSeq(names, ",") {
		n := len(chosen)
		for _, w := range all {
			if w.name == name {
				chosen = append(chosen, w)
			}
		}
		if len(chosen) == n {
			return nil, fmt.Errorf("there is no workload %q; -run list names them", name)
		}
	}
	return chosen, nil
}

// measureAll runs the workloads one after the other. Each is reported when it ends, so that an
// interrupt keeps what is done.
func measureAll(ctx context.Context, o options, chosen []workload) error {
	for _, w := range chosen {
		if o.docs == "" {
			break
		}
		if err := hasPlace(o.docs, w); err != nil {
			return err // before hours of work
		}
	}
	r, err := newRig(ctx, o)
	if err != nil {
		return err
	}
	defer r.close()
	machine := r.describe(ctx)
	fmt.Println(machine)
	for _, w := range chosen {
		started := time.Now()
		results, err := r.run(ctx, w)
		if err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		table := markdown(w, results, o)
		fmt.Printf("\n## %s\n\n%s\n(%s)\n", w.title, table, time.Since(started).Round(time.Second))
		if o.docs != "" {
			if err := publish(o.docs, w, machine, table); err != nil {
				return err
			}
		}
	}
	return nil
}
