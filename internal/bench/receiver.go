package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A tally is what the receiver has seen since it was reset. Requests come from many connections at
// once.
type tally struct {
	arrived  []atomic.Int64 // by the number of the event, in nanoseconds since 1970; 0: not yet
	distinct atomic.Int64
	requests atomic.Int64
	tenths   [11]atomic.Int64 // when so many tenths of the events had arrived; the first is that of the first event
	changed  chan struct{}    // of 1: a tenth is full, or a count that is waited for
	wanted   atomic.Int64
}

// arrivals is what the receiver reports of a tally.
type arrivals struct {
	Distinct int64     `json:"distinct"`
	Requests int64     `json:"requests"`
	Tenths   [11]int64 `json:"tenths"`
	At       []int64   `json:"at,omitempty"`
}

func newTally(events int) *tally {
	t := &tally{arrived: make([]atomic.Int64, events), changed: make(chan struct{}, 1)}
	t.wanted.Store(int64(events))
	return t
}

// add counts one request. Events beyond those expected are no part of the measurement.
func (t *tally) add(event int, at time.Time) {
	if event < 0 || event >= len(t.arrived) {
		return
	}
	t.requests.Add(1)
	if !t.arrived[event].CompareAndSwap(0, at.UnixNano()) {
		return
	}
	n := t.distinct.Add(1)
	if n == 1 {
		t.tenths[0].Store(at.UnixNano())
	}
	if tenth := n * 10 / int64(len(t.arrived)); tenth != (n-1)*10/int64(len(t.arrived)) {
		t.tenths[tenth].Store(at.UnixNano())
	}
	if n >= t.wanted.Load() {
		select {
		case t.changed <- struct{}{}:
		default:
		}
	}
}

func (t *tally) report(withTimes bool) (a arrivals) {
	a.Distinct, a.Requests = t.distinct.Load(), t.requests.Load()
	for i := range t.tenths {
		a.Tenths[i] = t.tenths[i].Load()
	}
	if withTimes {
		a.At = make([]int64, len(t.arrived))
		for i := range t.arrived {
			a.At[i] = t.arrived[i].Load()
		}
	}
	return a
}

// wait returns when so many distinct events have arrived, or at the end of the time.
func (t *tally) wait(ctx context.Context, count int64, timeout time.Duration) error {
	t.wanted.Store(count)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for t.distinct.Load() < count {
		select {
		case <-t.changed:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d events arrived within %s", t.distinct.Load(), count, timeout)
		}
	}
	return nil
}

// A receiver answers 200 to every POST and counts events. It reads HTTP/1.1 by hand, so that its
// cost hides little of the difference between the systems.
type receiver struct {
	tally    atomic.Pointer[tally]
	ctx      context.Context // ends the answers that are delayed
	listener net.Listener
	secure   *secureServers
}

// addresses are where a receiver listens.
type addresses struct {
	HTTP, TLS, HTTP2 string
	Authority        string // PEM
}

// waitArg is the argument of the receiver's command to wait.
type waitArg struct {
	Count   int64         `json:"count"`
	Timeout time.Duration `json:"timeout"`
}

// receive plays the receiver.
func receive(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // the answers that are delayed
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("start receiver: %w", err)
	}
	r := &receiver{ctx: ctx, listener: listener}
	r.tally.Store(newTally(0))
	if r.secure, err = startSecure(r); err != nil {
		return errors.Join(err, listener.Close())
	}
	var accepting sync.WaitGroup
	accepting.Go(r.accept)
	err = serve(ctx, r.handle)
	listener.Close()
	r.secure.close()
	accepting.Wait()
	return err
}

func (r *receiver) handle(ctx context.Context, name string, arg json.RawMessage) (any, error) {
	switch name {
	case "addresses":
		a := r.secure.addresses
		a.HTTP = r.listener.Addr().String()
		return a, nil
	case "reset":
		events, err := decode[int](arg)
		if err == nil {
			r.tally.Store(newTally(events))
		}
		return nil, err
	case "wait":
		a, err := decode[waitArg](arg)
		if err != nil {
			return nil, err
		}
		t := r.tally.Load()
		err = t.wait(ctx, a.Count, a.Timeout)
		return t.report(false), err
	case "report":
		return r.tally.Load().report(true), nil
	case "loop": // the bare loop in the receiver's own process
		p, err := decode[peer](arg)
		if err != nil {
			return nil, err
		}
		return nil, p.postAll(ctx)
	}
	return nil, fmt.Errorf("the receiver has no command %q", name)
}

func decode[T any](arg json.RawMessage) (value T, err error) {
	err = json.Unmarshal(arg, &value)
	return value, err
}

func (r *receiver) accept() {
	for {
		conn, err := r.listener.Accept()
		if err != nil {
			return
		}
		go r.serve(conn) // ends with the connection, at the latest with the process
	}
}

// serve answers the requests of one connection until it ends or breaks.
func (r *receiver) serve(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReaderSize(conn, 16<<10)
	ok := []byte("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	var body []byte
	for {
		delay, length, err := readHead(in)
		if err != nil {
			return
		}
		body = slices.Grow(body[:0], length)[:length]
		if _, err := io.ReadFull(in, body); err != nil {
			return
		}
		r.tally.Load().add(eventNumber(body), time.Now())
		if !r.pause(delay) {
			return
		}
		if _, err := conn.Write(ok); err != nil {
			return
		}
	}
}

// pause waits before an answer and reports whether the receiver still runs.
func (r *receiver) pause(delay time.Duration) bool {
	if delay == 0 {
		return true
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-r.ctx.Done():
		return false
	}
}

const contentLength = "content-length:"

// readHead reads a request up to its body: how long to wait before the answer, as its path says,
// and how long the body is.
func readHead(in *bufio.Reader) (delay time.Duration, length int, err error) {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return 0, 0, err
	}
	if fields := bytes.Fields(line); len(fields) == 3 {
		delay = pathDelay(fields[1])
	}
	for {
		if line, err = in.ReadSlice('\n'); err != nil {
			return 0, 0, err
		}
		if len(line) <= 2 {
			return delay, length, nil
		}
		if len(line) > len(contentLength) && strings.EqualFold(string(line[:len(contentLength)]), contentLength) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(line[len(contentLength):]))); err != nil {
				return 0, 0, err
			}
		}
	}
}

// pathDelay reads /MICROSECONDS/anything.
func pathDelay(path []byte) time.Duration {
	path = bytes.TrimPrefix(path, []byte("/"))
	if end := bytes.IndexByte(path, '/'); end >= 0 {
		path = path[:end]
	}
	n, _ := strconv.Atoi(string(path)) // otherwise no delay
	return time.Duration(n) * time.Microsecond
}
