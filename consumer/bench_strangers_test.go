package consumer_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// strangers is how many connections stall at once.
const strangers = 1000

// BenchmarkStalledStrangers measures what a receiver pays for 1,000 connections of another process that stall within their bodies.
// MiB-held is the memory that the receiver's process holds for them, buffers of net/http included. MiB-idle is what as many
// connections without a request hold. times-p99 is how much longer signed events take meanwhile, and left how many connections
// are still open after BodyTimeout. Strangers without a signature are refused before their body is read, those with a forged one
// after it.
func BenchmarkStalledStrangers(b *testing.B) {
	for name, forged := range map[string]bool{"unsigned": false, "forged": true} {
		b.Run(name, func(b *testing.B) {
			const events = 200
			e := newEnv(b, flavours[0], consumer.Config{Observe: unheard}, effect)
			clients := launchFor(b, "stall", "")
			sent := 0
			post := func() (took []time.Duration) {
				for range events {
					sent++
					began := time.Now()
					if got := e.post(fmt.Sprint("signed ", sent), "{}"); got.status != http.StatusCreated {
						b.Fatalf("a signed event was answered %d %s", got.status, got.body)
					}
					took = append(took, time.Since(began))
				}
				return took
			}
			var calm, beset []time.Duration
			var idle, held, left int64 // at most
			post()
			for b.Loop() {
				calm = append(calm, post()...)
				before := memoryInUse()
				clients.order(e.url)
				clients.wantLine(b)
				idle = max(idle, memoryInUse()-before)
				clients.order(stalledHead(e, forged))
				clients.wantLine(b)
				beset = append(beset, post()...)
				held = max(held, memoryInUse()-before)
				if n := runtime.NumGoroutine(); n < strangers {
					b.Errorf("%d goroutines: the connections were closed before they were measured", n)
				}
				clients.order("wait")
				n, err := strconv.ParseInt(clients.wantLine(b), 10, 64)
				if err != nil {
					b.Fatal(err)
				}
				left = max(left, n)
			}
			p99 := func(took []time.Duration) float64 { slices.Sort(took); return float64(took[len(took)*99/100]) }
			b.ReportMetric(float64(idle)/(1<<20), "MiB-idle")
			b.ReportMetric(float64(held)/(1<<20), "MiB-held")
			b.ReportMetric(p99(beset)/p99(calm), "times-p99")
			b.ReportMetric(float64(left), "left")
		})
	}
}

func memoryInUse() int64 {
	runtime.GC()
	runtime.GC() // what pools kept goes with the second one
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// stalledHead returns the head of a request of 200 KB as a line.
func stalledHead(e *env, forged bool) string {
	var head strings.Builder
	fmt.Fprintf(&head, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", 200_000)
	r := e.newRequest("stalled", "{}")
	if !forged {
		r.Header.Del(webhook.Signature)
	}
	_ = r.Header.Write(&head)
	return url.QueryEscape(head.String() + "\r\n")
}

// stallOnOrder is the process of the strangers. It opens connections to an address, sends a head and half a body on each, and
// waits until they are closed.
func stallOnOrder(p *player) {
	for url := range p.orders {
		stallOnce(p, strings.TrimPrefix(url, "http://"))
	}
}

func stallOnce(p *player, address string) {
	conns := make([]net.Conn, strangers)
	for i := range conns {
		var err error
		if conns[i], err = net.Dial("tcp", address); err != nil {
			panic(err)
		}
	}
	fmt.Println("connected")
	head, _ := url.QueryUnescape(<-p.orders)
	request := append([]byte(head), bytes.Repeat([]byte("x"), 100_000)...)
	each := func(do func(conn net.Conn)) {
		var all sync.WaitGroup
		for _, conn := range conns {
			all.Go(func() { do(conn) })
		}
		all.Wait()
	}
	each(func(conn net.Conn) {
		_ = conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)) // as far as it is read
		_, _ = conn.Write(request)
	})
	fmt.Println("stalled")
	<-p.orders
	var mu sync.Mutex
	left := 0
	each(func(conn net.Conn) {
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		var err error
		for buffer := make([]byte, 4096); err == nil; {
			_, err = conn.Read(buffer)
		}
		_ = conn.Close()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			mu.Lock()
			defer mu.Unlock()
			left++
		}
	})
	fmt.Println(left)
}
