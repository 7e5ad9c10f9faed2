package natspost

import (
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// A wire is the connection below the client library. The library writes whenever it has something, which is each message by itself; a
// wire collects what is written while the processors are busy, and writes that at once: a system call costs the relay and the server
// more than the message in it. It is safe for concurrent use.
//
// A peer that takes nothing must not hold up a write, and with it every attempt, for longer than an attempt may take.
type wire struct {
	net.Conn
	timeout time.Duration
	heard   atomic.Int64 // when something was last read, in Unix nanoseconds

	writing sync.WaitGroup // for the goroutine that writes, while there is something to write

	mu      sync.Mutex
	room    sync.Cond // for more, in pending
	pending []byte
	spare   []byte // what pending was before
	busy    bool   // writing
	failed  error  // why nothing can be written any more
}

// Bounds of what a wire keeps, in bytes.
const (
	maxPending = 256 << 10 // beyond it, writes wait
	maxSpare   = 512 << 10 // of memory that is used again
)

func newWire(c net.Conn, timeout time.Duration) *wire {
	w := &wire{Conn: c, timeout: timeout}
	w.room.L = &w.mu
	return w
}

// Read implements [net.Conn].
func (w *wire) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if n > 0 {
		w.heard.Store(time.Now().UnixNano())
	}
	if err != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.failed != nil { // which says more than that the connection is closed
			err = w.failed
		}
	}
	return n, err
}

// Write implements [net.Conn]. It returns before b is written. If that fails later, the connection ends.
func (w *wire) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.pending) > maxPending && w.failed == nil {
		w.room.Wait()
	}
	if w.failed != nil {
		return 0, w.failed
	}
	w.pending = append(w.pending, b...)
	if !w.busy {
		w.busy = true
		w.writing.Go(w.writeAll)
	}
	return len(b), nil
}

// writeAll writes until nothing is left to write.
func (w *wire) writeAll() {
	for {
		runtime.Gosched() // attempts that can go on do so first, and add their messages
		w.mu.Lock()
		b := w.pending
		if len(b) == 0 || w.failed != nil {
			w.busy = false
			w.mu.Unlock()
			return
		}
		w.pending, w.spare = w.spare[:0], nil
		w.room.Broadcast()
		w.mu.Unlock()
		err := w.SetWriteDeadline(time.Now().Add(w.timeout))
		if err == nil {
			_, err = w.Conn.Write(b)
		}
		if err != nil {
			w.fail(err)
		} else if cap(b) <= maxSpare {
			w.mu.Lock()
			w.spare = b
			w.mu.Unlock()
		}
	}
}

// fail ends the connection: what comes behind a part of a message would be no message.
func (w *wire) fail(err error) {
	w.mu.Lock()
	if w.failed == nil {
		w.failed = err
	}
	w.room.Broadcast()
	w.mu.Unlock()
	_ = w.Conn.Close()
}

// Close implements [net.Conn]. It writes nothing any more: a connection is closed when no attempt waits for an answer on it.
func (w *wire) Close() error {
	w.fail(net.ErrClosed)
	w.writing.Wait()
	return nil
}
