package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// besideOther keeps of each workload outbox-relay alone and adds another build of it: the two take
// turns, so that a difference between them is no difference between two moments of the machine.
// Each metric gets a column with the ratio of the two.
func besideOther(chosen []workload, other string) ([]workload, error) {
	other, err := filepath.Abs(other)
	if err != nil {
		return nil, fmt.Errorf("find the other build: %w", err)
	}
	if _, err := os.Stat(other); err != nil {
		return nil, fmt.Errorf("find the other build: %w", err)
	}
	chosen = onlyOurs(chosen)
	for i := range chosen {
		w := &chosen[i]
		w.ratios = nil
		for _, m := range w.metrics {
			w.ratios = append(w.ratios, ratio{heading: m.heading + ": beside the other", metric: m.key, toSystem: nameOther})
		}
		for j := range w.cases {
			c := &w.cases[j]
			for _, e := range slices.Clone(c.entrants) {
				c.entrants = append(c.entrants, entrant{nameOther, func(ctx context.Context, r *rig) (sample, error) {
					measured := r.options.relay
					r.options.relay = other
					defer func() { r.options.relay = measured }()
					return e.measure(ctx, r)
				}})
			}
		}
	}
	return chosen, nil
}

// onlyOurs keeps of each workload outbox-relay alone.
func onlyOurs(chosen []workload) []workload {
	chosen = slices.Clone(chosen)
	for i := range chosen {
		w := &chosen[i]
		w.ratios = nil
		w.cases = slices.Clone(w.cases)
		for j := range w.cases {
			c := &w.cases[j]
			c.entrants = slices.DeleteFunc(slices.Clone(c.entrants), func(e entrant) bool { return e.system != nameOurs })
		}
		w.cases = slices.DeleteFunc(w.cases, func(c testCase) bool { return len(c.entrants) == 0 })
	}
	return chosen
}

// onlyCases keeps the cases whose names match. It fails if a workload has none.
func onlyCases(chosen []workload, matches func(name string) bool) ([]workload, error) {
	chosen = slices.Clone(chosen)
	for i := range chosen {
		w := &chosen[i]
		w.cases = slices.DeleteFunc(slices.Clone(w.cases), func(c testCase) bool { return !matches(c.name) })
		if len(w.cases) == 0 {
			return nil, fmt.Errorf("no case of %s matches -cases", w.name)
		}
	}
	return chosen, nil
}
