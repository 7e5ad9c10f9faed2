package relay

import "slices"

// byDestination returns the deliveries of each destination. Those of a single one are not copied.
func byDestination(all []delivery) map[string][]delivery {
	counts := map[string]int{}
	for i := range all {
		counts[all[i].destination]++
	}
	parts := make(map[string][]delivery, len(counts))
	for destination, n := range counts {
		if n == len(all) {
			parts[destination] = all
			return parts
		}
		parts[destination] = make([]delivery, 0, n)
	}
	for i := range all {
		parts[all[i].destination] = append(parts[all[i].destination], all[i])
	}
	return parts
}

// runs makes runs of claimed deliveries, in the order of their heads. A delivery whose predecessor was not claimed with it,
// because another session had locked that, is returned in broken, to be given back. Runs of one delivery share the memory of
// claimed.
func runs(claimed []delivery) (all [][]delivery, broken []delivery) {
	type key struct{ destination, ordering string }
	of := map[key]int{} // index of the run in all
	all = make([][]delivery, 0, len(claimed))
	var followers []delivery
	for i := range claimed {
		d := &claimed[i]
		if d.after != 0 {
			followers = append(followers, *d)
			continue
		}
		if d.event.OrderingKey != nil {
			of[key{d.destination, *d.event.OrderingKey}] = len(all)
		}
		all = append(all, claimed[i:i+1:i+1])
	}
	slices.SortFunc(followers, func(a, b delivery) int { return a.placeInKey().Compare(b.placeInKey()) })
	for _, d := range followers {
		if d.event.OrderingKey != nil {
			if i, known := of[key{d.destination, *d.event.OrderingKey}]; known && all[i][len(all[i])-1].eventID == d.after {
				all[i] = append(all[i], d)
				continue
			}
		}
		broken = append(broken, d)
	}
	for _, run := range all {
		run[len(run)-1].lastOfRun = true
	}
	return all, broken
}
