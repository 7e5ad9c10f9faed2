package history

import (
	"maps"
	"net/http"
	"slices"
)

// A Work is a row of inbox_events, and what its handler asked for.
type Work struct {
	Key      string
	State    string
	Attempts int
	Early    bool   // when its effect was made, an earlier event of its ordering key was not done
	End      string // the state that its handler asked for
	Counted  int    // the attempts of its handler that count
}

// worked checks what receivers that record events did with them: each was recorded once, worked in
// its turn, and ended as its handler asked, after as many attempts. A record that was answered for
// is still there.
func (c *checker) worked() {
	records := map[string]bool{}
	for _, w := range c.Worked {
		records[w.Key] = true
		if w.State != w.End {
			c.breach(WrongEnd, w.Key, "is %s, not %s", w.State, w.End)
		} else if w.Attempts != w.Counted {
			c.breach(Attempts, w.Key, "counts %d attempts in the inbox, and its handler made %d that count", w.Attempts, w.Counted)
		}
		if w.Early {
			c.breach(Order, w.Key, "was worked before an earlier event of its ordering key was done")
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.posts)) {
		recorded := 0
		for _, p := range c.posts[key] {
			if p.Status == http.StatusAccepted {
				recorded++
			}
		}
		if recorded > 0 && !records[key] {
			c.breach(Lost, key, "was answered that it was recorded, and has no record")
		}
		if recorded > 1 {
			c.breach(Dedupe, key, "was answered %d times that it was recorded now", recorded)
		}
	}
}
