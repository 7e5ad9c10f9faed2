package relay

import "sync"

// hands are the ranges that this relay has in hand, by their numbers. It is safe for concurrent use.
type hands struct{ seqs sync.Map }

func (h *hands) add(seq int64) { h.seqs.Store(seq, true) }

func (h *hands) remove(seq int64) { h.seqs.Delete(seq) }

// list is not nil: to the database that would be an unknown list.
func (h *hands) list() []int64 {
	list := []int64{}
	for seq := range h.seqs.Range {
		list = append(list, seq.(int64))
	}
	return list
}
