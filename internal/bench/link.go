package main

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"
)

// A link forwards TCP connections and delays what passes by half a round trip each way. It keeps
// the order and limits no bandwidth, as a distant network does.
type link struct {
	listener net.Listener
	target   string
	delay    time.Duration
	cancel   context.CancelFunc
	running  sync.WaitGroup
}

// chunk is what was read at once, and when it may continue.
type chunk struct {
	due  time.Time
	data []byte
}

func startLink(ctx context.Context, target string, roundTrip time.Duration) (*link, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start link: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	l := &link{listener: listener, target: target, delay: roundTrip / 2, cancel: cancel}
	l.running.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			l.running.Go(func() { l.forward(ctx, conn) })
		}
	})
	return l, nil
}

func (l *link) addr() string { return l.listener.Addr().String() }

func (l *link) close() {
	l.cancel()
	l.listener.Close()
	l.running.Wait()
}

// forward joins one connection with one to the target until either ends.
func (l *link) forward(ctx context.Context, near net.Conn) {
	defer near.Close()
	far, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.target)
	if err != nil {
		return
	}
	defer far.Close()
	stop := context.AfterFunc(ctx, func() {
		near.Close()
		far.Close()
	})
	defer stop()
	var both sync.WaitGroup
	both.Go(func() { l.pass(near, far) })
	both.Go(func() { l.pass(far, near) })
	both.Wait()
}

// pass copies one direction up to its end, which it passes on. Where writing fails it ends reading
// too.
func (l *link) pass(from, to net.Conn) {
	chunks := make(chan chunk, 4096)
	var writing sync.WaitGroup
	writing.Go(func() {
		for c := range chunks {
			if wait := time.Until(c.due); wait > 0 {
				<-time.After(wait)
			}
			if _, err := to.Write(c.data); err != nil {
				from.Close()
			}
		}
		_ = to.(*net.TCPConn).CloseWrite() // fails when the other end has gone
	})
	for {
		data := make([]byte, 32<<10)
		n, err := from.Read(data)
		if n > 0 {
			chunks <- chunk{due: time.Now().Add(l.delay), data: data[:n]}
		}
		if err != nil {
			break
		}
	}
	close(chunks)
	writing.Wait()
}
