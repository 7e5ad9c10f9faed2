package main

import (
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
)

// A workload is one table of the report: its cases, and the systems that each case is measured on.
type workload struct {
	name    string // as -run takes it
	title   string
	about   string // what a reader has to know
	metrics []metric
	ratios  []ratio
	cases   []testCase
}

// A metric is one column.
type metric struct {
	key, heading string
	decimals     int
}

// A ratio is a column that divides a metric by the same metric of the same round elsewhere.
type ratio struct {
	heading, metric string
	toCase          string // empty: the same
	toSystem        string // empty: the same
}

// A testCase is one condition.
type testCase struct {
	name     string
	entrants []entrant
}

// An entrant measures one system once.
type entrant struct {
	system  string
	measure func(ctx context.Context, r *rig) (sample, error)
}

// place says where a sample belongs.
type place struct{ testCase, system string }

// results are the samples of a workload, one a round.
type results map[place][]sample

// run measures a workload. The systems of a case take turns, each round begins with another one,
// and the cases follow each other within a round: so what the machine does besides falls on all of
// them.
func (r *rig) run(ctx context.Context, w workload) (results, error) {
	all := results{}
	for round := range r.options.rounds {
		for _, c := range w.cases {
			for i := range c.entrants {
				e := c.entrants[(i+round)%len(c.entrants)]
				found, err := e.measure(ctx, r)
				if ctx.Err() != nil {
					return nil, context.Cause(ctx)
				}
				if err != nil {
					return nil, fmt.Errorf("%s, %s: %w", c.name, e.system, err)
				}
				at := place{c.name, e.system}
				all[at] = append(all[at], found)
				fmt.Fprintf(os.Stderr, "%s %d/%d: %s, %s:", w.name, round+1, r.options.rounds, c.name, e.system)
				for _, m := range w.metrics {
					if value, ok := found[m.key]; ok {
						fmt.Fprintf(os.Stderr, " %s %s,", number(value, m.decimals), m.heading)
					}
				}
				fmt.Fprintln(os.Stderr)
			}
		}
	}
	return all, nil
}

// values returns a metric of all rounds; none, where it was not measured.
func (all results) values(at place, key string) (values []float64) {
	for _, s := range all[at] {
		if value, ok := s[key]; ok {
			values = append(values, value)
		}
	}
	return values
}

// ratios returns a ratio of all rounds.
func (all results) ratios(at place, by ratio) (values []float64) {
	base := at
	if by.toCase != "" {
		base.testCase = by.toCase
	}
	if by.toSystem != "" {
		base.system = by.toSystem
	}
	own, others := all.values(at, by.metric), all.values(base, by.metric)
	if base == at || len(own) != len(others) {
		return nil
	}
	for round := range own {
		if others[round] > 0 {
			values = append(values, own[round]/others[round])
		}
	}
	return values
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if n := len(sorted); n%2 == 0 {
		return (sorted[n/2-1] + sorted[n/2]) / 2
	}
	return sorted[len(sorted)/2]
}

// riverVersion is the version of River that this program was built with.
func riverVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dependency := range info.Deps {
			if dependency.Path == "github.com/riverqueue/river" {
				return dependency.Version
			}
		}
	}
	return ""
}
