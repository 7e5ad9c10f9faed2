package consumer_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// BenchmarkStalledStrangers measures what a receiver pays for connections of another process that stall within their bodies, and that
// come again whenever they are closed. MiB-held is the memory that the receiver's process holds for them, buffers of net/http
// included. MiB-idle is what as many connections without a request hold. ms-p50, ms-p99 and ms-max are how long signed events of
// 20 KB take meanwhile, and calm-ms-p99 without strangers. Strangers without a signature are refused before their body is read, those
// with a forged one after it.
func BenchmarkStalledStrangers(b *testing.B) {
	for _, attack := range []struct {
		name                    string
		strangers, length, part int
	}{
		{"unsigned", 600, 256 << 10, 100 << 10},
		{"forged", 600, 256 << 10, 100 << 10},
		{"forged", 3000, 256 << 10, 100 << 10},
		{"forged-1MiB", 600, 1 << 20, 1<<20 - 1},
		{"forged-20KiB", 600, 20 << 10, 10 << 10},
	} {
		if testing.Short() && attack.name != "unsigned" {
			continue
		}
		b.Run(fmt.Sprint(attack.name, "-", attack.strangers), func(b *testing.B) {
			const events = 200
			e := receivertest.NewEnv(b, receivertest.PGX(), consumer.Config{Observe: receivertest.Unheard}, receivertest.Effect)
			clients := receivertest.LaunchFor(b, "stall", "")
			sent := 0
			body := strings.Repeat(" ", 20<<10) + "{}"
			post := func() (took []time.Duration) {
				for range events {
					sent++
					began := time.Now()
					if got := e.Post(fmt.Sprint("signed ", sent), body); got.Status != http.StatusCreated {
						b.Fatalf("a signed event was answered %d %s", got.Status, got.Body)
					}
					took = append(took, time.Since(began))
				}
				slices.Sort(took)
				return took
			}
			post()
			ms := func(took []time.Duration, percent int) float64 {
				return float64(took[(len(took)-1)*percent/100].Microseconds()) / 1000
			}
			for b.Loop() {
				calm := post()
				before := memoryInUse()
				clients.Order(fmt.Sprint(strings.TrimPrefix(e.URL, "http://"), " ", attack.strangers, " ", attack.part, " ", stalledHead(e, attack.length, attack.name != "unsigned")))
				clients.WantLine(b) // connected
				idle := memoryInUse() - before
				clients.Order("attack")
				clients.WantLine(b) // all have sent
				beset := post()
				b.ReportMetric(float64(idle)/(1<<20), "MiB-idle")
				b.ReportMetric(float64(memoryInUse()-before)/(1<<20), "MiB-held")
				b.ReportMetric(ms(calm, 99), "calm-ms-p99")
				b.ReportMetric(ms(beset, 50), "ms-p50")
				b.ReportMetric(ms(beset, 99), "ms-p99")
				b.ReportMetric(ms(beset, 100), "ms-max")
				clients.Order("stop")
				clients.WantLine(b)
			}
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

// stalledHead returns the head of a request of a length as a word.
func stalledHead(e *receivertest.Env, length int, forged bool) string {
	var head strings.Builder
	fmt.Fprintf(&head, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", length)
	r := e.NewRequest("stalled", "{}")
	if !forged {
		r.Header.Del(webhook.Signature)
	}
	_ = r.Header.Write(&head)
	return url.QueryEscape(head.String() + "\r\n")
}

// stallOnOrder is the process of the strangers: see stallOnce.
func stallOnOrder(p *receivertest.Player) {
	for order := range p.Orders {
		var address, head string
		var strangers, part int
		if _, err := fmt.Sscan(order, &address, &strangers, &part, &head); err != nil {
			panic(err)
		}
		stallOnce(p, address, strangers, part, head)
	}
}

// stallOnce opens connections. On a signal it sends a head and part of a body on each. When the server closes one, it opens another,
// until it is stopped.
func stallOnce(p *receivertest.Player, address string, strangers, part int, head string) {
	head, _ = url.QueryUnescape(head)
	request := append([]byte(head), bytes.Repeat([]byte("x"), part)...)
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			panic(err)
		}
		return conn
	}
	conns := make([]net.Conn, strangers)
	for i := range conns {
		conns[i] = dial()
	}
	fmt.Println("connected")
	<-p.Orders
	ctx, stop := context.WithCancel(context.Background())
	var sent, all sync.WaitGroup
	sent.Add(strangers)
	for _, conn := range conns {
		all.Go(func() {
			for first := true; ; first = false {
				end := context.AfterFunc(ctx, func() { _ = conn.Close() })
				_ = conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)) // as far as it is read
				_, _ = conn.Write(request)
				if first {
					sent.Done()
				}
				_ = conn.SetWriteDeadline(time.Time{})
				_, _ = io.Copy(io.Discard, conn)
				end()
				_ = conn.Close()
				if ctx.Err() != nil {
					return
				}
				conn = dial()
			}
		})
	}
	sent.Wait()
	fmt.Println("stalled")
	<-p.Orders
	stop()
	all.Wait()
	fmt.Println("stopped")
}
