package settings

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// A Watched value comes from one or several files, and is read again when one of them changes:
// certificates are renewed and tokens rotated under a running process. [Watched.Get] looks at the
// files, so that no goroutine and no signal is needed. A file that cannot be used leaves the value
// as it was.
type Watched[T any] struct {
	names []string
	limit int64 // bytes, of each file
	parse func(contents [][]byte) (T, error)
	log   *zerolog.Logger

	mu       sync.Mutex
	value    T
	contents [][]byte
	states   []fs.FileInfo // of the files when they were read last; nil: read them again
	mistake  string        // with the files as they are; it is logged once
}

// WatchFiles returns the value that the files hold now, or what is wrong with them. Changes are
// logged.
func WatchFiles[T any](log *zerolog.Logger, limit int64, parse func([][]byte) (T, error), names ...string) (*Watched[T], error) {
	w := &Watched[T]{names: names, limit: limit, parse: parse, log: log}
	return w, w.read(time.Now())
}

// Get returns the value that the files hold now. It is safe for concurrent use.
func (w *Watched[T]) Get() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unchanged() {
		return w.value
	}
	before := w.contents
	switch err := w.read(time.Now()); {
	case err == nil && (w.mistake != "" || !slices.EqualFunc(before, w.contents, bytes.Equal)):
		w.mistake = ""
		w.log.Info().Strs("files", w.names).Msg("files changed; what they hold now is in use")
	case err != nil && err.Error() != w.mistake:
		w.mistake = err.Error()
		w.log.Error().Err(err).Strs("files", w.names).Msg("files changed and cannot be used; what they held before stays in use")
	}
	return w.value
}

func (w *Watched[T]) unchanged() bool {
	if w.states == nil {
		return false
	}
	for i, name := range w.names {
		info, err := os.Stat(name)
		if err != nil || !sameState(info, w.states[i]) {
			return false
		}
	}
	return true
}

// sameState reports whether a file is still the one that was read. A file that is swapped in by a
// rename or a symbolic link may have the old one's size and time.
func sameState(a, b fs.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// fresh is how long after a change a file is read again at every look: it may be half written, and
// the second half may carry the time of the first.
const fresh = 2 * time.Second

func (w *Watched[T]) read(now time.Time) error {
	w.states = nil
	states, contents := make([]fs.FileInfo, len(w.names)), make([][]byte, len(w.names))
	settled := true
	for i, name := range w.names {
		info, err := os.Stat(name) // before reading: what changes in between is noticed at the next look
		if err != nil {
			return fmt.Errorf("cannot read %s: %w", name, cause(err))
		}
		if states[i] = info; now.Sub(info.ModTime()) < fresh {
			settled = false
		}
		if contents[i], _, err = readRegular(name, w.limit); err != nil {
			return fmt.Errorf("cannot read %s: %w", name, err)
		}
	}
	value, err := w.parse(contents)
	if err != nil {
		return err
	}
	w.value, w.contents = value, contents
	if settled {
		w.states = states
	}
	return nil
}
