package consumer_test

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// BenchmarkStalledStrangers measures what 1,000 connections cost that stall within their bodies: MiB-held is what they hold of
// memory, both ends of the connections together, times-p99 how much longer signed events take meanwhile, and left how many are
// not closed after BodyTimeout. Strangers without a signature are turned away before their body, those with a forged one after it.
func BenchmarkStalledStrangers(b *testing.B) {
	for name, forged := range map[string]bool{"unsigned": false, "forged": true} {
		b.Run(name, func(b *testing.B) {
			const strangers, events = 1000, 200
			e := newEnv(b, flavours[0], consumer.Config{Observe: unheard}, effect)
			sent := 0
			p99 := func() time.Duration {
				took := make([]time.Duration, events)
				for i := range took {
					sent++
					began := time.Now()
					if got := e.post(fmt.Sprint("signed ", sent), "{}"); got.status != http.StatusCreated {
						b.Fatalf("a signed event was answered %d %s", got.status, got.body)
					}
					took[i] = time.Since(began)
				}
				slices.Sort(took)
				return took[events*99/100]
			}
			for b.Loop() {
				p99()
				calm, before := p99(), memoryInUse()
				conns := make([]net.Conn, strangers)
				var dialling sync.WaitGroup
				for i := range conns {
					dialling.Go(func() { conns[i] = stallAs(b, e, forged) })
					if i%50 == 49 { // no more than the listener's queue holds
						dialling.Wait()
					}
				}
				beset := p99()
				b.ReportMetric(float64(int64(memoryInUse())-int64(before))/(1<<20), "MiB-held")
				b.ReportMetric(float64(beset)/float64(calm), "times-p99")
				left := 0
				for _, conn := range conns {
					_ = conn.SetReadDeadline(time.Now().Add(patience))
					for buffer := make([]byte, 4096); ; {
						if _, err := conn.Read(buffer); err != nil {
							if errors.Is(err, os.ErrDeadlineExceeded) {
								left++
							}
							break
						}
					}
					_ = conn.Close()
				}
				b.ReportMetric(float64(left), "left")
			}
		})
	}
}

func memoryInUse() uint64 {
	runtime.GC()
	runtime.GC() // what pools kept goes with the second one
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// stallAs begins a request of 200 KB and sends half of it, as far as it is read.
func stallAs(b *testing.B, e *env, forged bool) net.Conn {
	conn, err := net.Dial("tcp", strings.TrimPrefix(e.url, "http://"))
	if err != nil {
		b.Fatal(err)
	}
	var head strings.Builder
	fmt.Fprintf(&head, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", 200_000)
	r := e.newRequest("stalled", "{}")
	if !forged {
		r.Header.Del(webhook.Signature)
	}
	_ = r.Header.Write(&head)
	_ = conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = conn.Write([]byte(head.String() + "\r\n" + strings.Repeat("x", 100_000)))
	return conn
}
