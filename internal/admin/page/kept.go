package page

import (
	"sync"
	"time"
)

// maxKept bounds how many views are kept: each may hold a list.
const maxKept = 16

// kept are the views that were shown last, by their address: what people look at while the database
// is away. It is safe for concurrent use.
type kept struct {
	mu    sync.Mutex
	views map[string]keptView
}

type keptView struct {
	view
	at time.Time
}

// keep remembers a view, in place of the oldest one if there are many.
func (k *kept) keep(address string, v view, at time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.views == nil {
		k.views = map[string]keptView{}
	}
	if _, known := k.views[address]; !known && len(k.views) >= maxKept {
		oldest := address
		for other, one := range k.views {
			if oldest == address || one.at.Before(k.views[oldest].at) {
				oldest = other
			}
		}
		delete(k.views, oldest)
	}
	k.views[address] = keptView{v, at}
}

// last returns the view that was shown last at an address, and when it was read.
func (k *kept) last(address string) (v view, at time.Time, known bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	one, known := k.views[address]
	return one.view, one.at, known
}
