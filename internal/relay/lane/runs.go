package lane

import "slices"

// ByDestination returns the deliveries of each destination. Those of a single one are not copied.
func ByDestination(all []Delivery) map[string][]Delivery {
	counts := map[string]int{}
	for i := range all {
		counts[all[i].Destination]++
	}
	parts := make(map[string][]Delivery, len(counts))
	for destination, n := range counts {
		if n == len(all) {
			parts[destination] = all
			return parts
		}
		parts[destination] = make([]Delivery, 0, n)
	}
	for i := range all {
		parts[all[i].Destination] = append(parts[all[i].Destination], all[i])
	}
	return parts
}

// Runs makes runs of claimed deliveries, in the order of their heads. A delivery whose predecessor
// was not claimed with it, because another session had locked that, is returned in broken, to be
// given back. Runs of one delivery share the memory of claimed.
func Runs(claimed []Delivery) (all [][]Delivery, broken []Delivery) {
	type key struct{ destination, ordering string }
	of := map[key]int{} // index of the run in all
	all = make([][]Delivery, 0, len(claimed))
	var followers []Delivery
	for i := range claimed {
		d := &claimed[i]
		if d.After != 0 {
			followers = append(followers, *d)
			continue
		}
		if d.Event.OrderingKey != nil {
			of[key{d.Destination, *d.Event.OrderingKey}] = len(all)
		}
		all = append(all, claimed[i:i+1:i+1])
	}
	slices.SortFunc(followers, func(a, b Delivery) int { return a.PlaceInKey().Compare(b.PlaceInKey()) })
	for _, d := range followers {
		if d.Event.OrderingKey != nil {
			if i, known := of[key{d.Destination, *d.Event.OrderingKey}]; known && all[i][len(all[i])-1].EventID == d.After {
				all[i] = append(all[i], d)
				continue
			}
		}
		broken = append(broken, d)
	}
	for _, run := range all {
		run[len(run)-1].LastOfRun = true
	}
	return all, broken
}
