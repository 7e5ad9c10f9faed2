package natspost

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// pipe returns a wire and its peer. A write over it waits until the peer reads.
func pipe(t *testing.T, timeout time.Duration) (*wire, net.Conn) {
	t.Helper()
	c, peer := net.Pipe()
	w := newWire(c, timeout)
	t.Cleanup(func() {
		_ = peer.Close()
		_ = w.Close()
	})
	return w, peer
}

func TestWireKeepsOrder(t *testing.T) {
	t.Parallel()
	w, peer := pipe(t, time.Minute)
	want := bytes.Repeat([]byte("0123456789"), 100_000)
	var writing sync.WaitGroup
	defer writing.Wait()
	writing.Go(func() {
		for i := 0; i < len(want); i += 1000 {
			if _, err := w.Write(want[i : i+1000]); err != nil {
				t.Error(err)
				return
			}
		}
	})
	got := make([]byte, len(want))
	if _, err := io.ReadFull(peer, got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes arrived changed, %v", len(got), err)
	}
}

// A peer that takes nothing bounds what waits for it, and how long.
func TestWireOfAPeerThatTakesNothing(t *testing.T) {
	t.Parallel()
	w, _ := pipe(t, 50*time.Millisecond)
	block := make([]byte, 64<<10)
	var err error
	for written := 0; err == nil; written += len(block) {
		if most := 2*maxPending + 2*len(block); written > most {
			t.Fatalf("%d bytes wait for a peer that takes nothing", written)
		}
		_, err = w.Write(block)
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a write fails with %v", err)
	}
	if _, err := w.Read(block); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a read fails with %v, which hides why the connection ended", err)
	}
}

func TestWireIsClosedWhileItWrites(t *testing.T) {
	t.Parallel()
	w, _ := pipe(t, time.Hour)
	if _, err := w.Write([]byte("nothing reads this")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if _, err := w.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a write after that: %v", err)
	}
}
