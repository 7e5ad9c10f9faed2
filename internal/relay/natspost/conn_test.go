package natspost

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// pipe returns a batchConn and its peer. A write over it waits until the peer reads.
func pipe(t *testing.T, timeout time.Duration) (*batchConn, net.Conn) {
	t.Helper()
	c, peer := net.Pipe()
	batches := &batchConn{Conn: c, timeout: timeout, out: bufio.NewWriter(c)}
	t.Cleanup(func() {
		_ = peer.Close()
		_ = batches.Close()
	})
	return batches, peer
}

func TestBatchesKeepOrder(t *testing.T) {
	t.Parallel()
	c, peer := pipe(t, time.Minute)
	want := bytes.Repeat([]byte("0123456789"), 100_000)
	var writing sync.WaitGroup
	defer writing.Wait()
	writing.Go(func() {
		for i := 0; i < len(want); i += 1000 {
			if _, err := c.Write(want[i : i+1000]); err != nil {
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
func TestPeerThatTakesNothing(t *testing.T) {
	t.Parallel()
	c, _ := pipe(t, 50*time.Millisecond)
	block := make([]byte, 1<<10)
	var err error
	for written := 0; err == nil; written += len(block) {
		if most := c.out.Size() + len(block); written > most {
			t.Fatalf("%d bytes wait for a peer that takes nothing", written)
		}
		_, err = c.Write(block)
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a write fails with %v", err)
	}
	if _, err := c.Read(block); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a read fails with %v: the connection did not end", err)
	}
}

func TestConnectionIsClosedWhileItWrites(t *testing.T) {
	t.Parallel()
	c, _ := pipe(t, time.Hour)
	if _, err := c.Write([]byte("nothing reads this")); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a write after that: %v", err)
	}
}
