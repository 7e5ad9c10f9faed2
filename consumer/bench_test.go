package consumer_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// BenchmarkOverhead compares a handler behind each middleware with the same handler in a
// transaction of its own, both in one server and asked by one sender. They take turns within one
// loop, so that all meet the same machine. times-bare is the ratio of what a sender waits, and
// quiet-times-bare that of the tenths that wait least, which other load changes less;
// inside-times-bare leaves HTTP out, the same for both. Where the middleware needs more round trips
// to the database, trips-times-bare is what the bare transaction takes with as many that ask
// nothing.
func BenchmarkOverhead(b *testing.B) {
	for _, f := range receivertest.Flavours() {
		b.Run(f.Name, func(b *testing.B) {
			server := pgtest.Start(b, localpg.Options{Durable: true}) // a commit that costs what it costs in production
			dsn := server.DSN("postgres")
			pgtest.Migrate(b, dsn, migrations.Inbox)
			pool := pgtest.Pool(b, dsn)
			pgtest.Exec(b, pool, receivertest.Schema)
			guarded := f.Wrap(b, dsn, consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}})(http.HandlerFunc(
				func(w http.ResponseWriter, r *http.Request) {
					if err := f.Exec(r.Context(), "INSERT INTO effect VALUES ($1)", "k"); err != nil {
						b.Error(err)
					}
					w.WriteHeader(http.StatusNoContent)
				}))
			contenders := []*served{serve(b, bareTransaction(b, f, dsn, "")), serve(b, guarded)}
			bare, with := contenders[0], contenders[1]
			if f.Name == "database/sql" {
				contenders = append(contenders, serve(b, bareTransaction(b, f, dsn, "SELECT 1")))
			}
			for i := 0; b.Loop(); i++ {
				for _, c := range contenders {
					c.ask(b, i)
				}
			}
			b.ReportMetric(float64(bare.waited.Microseconds())/float64(b.N), "bare-µs/op")
			b.ReportMetric(float64(with.waited.Microseconds())/float64(b.N), "middleware-µs/op")
			b.ReportMetric(float64(with.waited)/float64(bare.waited), "times-bare")
			b.ReportMetric(quietest(with.each)/quietest(bare.each), "quiet-times-bare")
			b.ReportMetric(float64(with.worked.Load())/float64(bare.worked.Load()), "inside-times-bare")
			for _, trips := range contenders[2:] {
				b.ReportMetric(float64(trips.waited)/float64(bare.waited), "trips-times-bare")
			}
		})
	}
}

// served is a handler behind HTTP, and how long it took.
type served struct {
	url    string
	client *http.Client
	waited time.Duration // by its sender
	each   []time.Duration
	worked atomic.Int64 // nanoseconds within the handler
}

func serve(b *testing.B, h http.Handler) *served {
	b.Helper()
	s := &served{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		h.ServeHTTP(w, r)
		s.worked.Add(int64(time.Since(start)))
	}))
	b.Cleanup(server.Close)
	s.url, s.client = server.URL, server.Client()
	return s
}

// quietest returns the longest of the tenth that was shortest.
func quietest(durations []time.Duration) float64 {
	slices.Sort(durations)
	return float64(durations[len(durations)/10])
}

// ask sends an event as a relay does.
func (s *served) ask(b *testing.B, i int) {
	body := bytes.Repeat([]byte(`{"a":1}`), 100)
	r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, s.url, bytes.NewReader(body))
	pgtest.Must(b, err)
	r.Header.Set(webhook.IdempotencyKey, "key-"+strconv.Itoa(i))
	r.Header.Set(webhook.EventType, "invoice.created")
	r.Header.Set(webhook.EventID, strconv.Itoa(i+1))
	r.Header.Set(webhook.CreatedAt, time.Now().Format(time.RFC3339Nano))
	r.Header.Set(webhook.NotAfter, time.Now().AddDate(0, 0, 30).Format(time.RFC3339Nano))
	r.Header.Set(webhook.Attempt, "1")
	webhook.Sign(r.Header, body, time.Now(), receivertest.Secret())
	start := time.Now()
	response, err := s.client.Do(r)
	pgtest.Must(b, err)
	took := time.Since(start)
	s.waited, s.each = s.waited+took, append(s.each, took)
	answer, _ := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		b.Fatalf("status %d: %s", response.StatusCode, answer)
	}
}

// bareTransaction is the handler as its author would write it without this package. more, if any,
// is what database/sql asks before and after its work.
func bareTransaction(b *testing.B, f receivertest.Flavour, dsn, more string) http.Handler {
	pool, db := pgtest.Pool(b, dsn), receivertest.OpenSQL(b, dsn)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		if err == nil && f.Name == "pgx" {
			tx, begun := pool.Begin(r.Context())
			if begun != nil {
				b.Fatal(begun)
			}
			if _, err = tx.Exec(r.Context(), "INSERT INTO effect VALUES ($1)", "k"); err == nil {
				err = tx.Commit(r.Context())
			}
		} else if err == nil {
			tx, begun := db.BeginTx(r.Context(), nil)
			if begun != nil {
				b.Fatal(begun)
			}
			ask := func(query string, args ...any) {
				if query != "" && err == nil {
					_, err = tx.ExecContext(r.Context(), query, args...)
				}
			}
			ask(more)
			ask("INSERT INTO effect VALUES ($1)", "k")
			ask(more)
			if err == nil {
				err = tx.Commit()
			}
		}
		if err != nil {
			b.Error(err)
		}
		w.WriteHeader(http.StatusNoContent)
	})
}

// BenchmarkStalledStrangers measures what a receiver pays for connections of another process that
// stall within their bodies, and that come again whenever they are closed. MiB-held is the memory
// that the receiver's process holds for them, buffers of net/http included. MiB-idle is what as
// many connections without a request hold. ms-p50, ms-p99 and ms-max are how long signed events of
// 20 KB take meanwhile, and calm-ms-p99 without strangers. Strangers without a signature are
// refused before their body is read, those with a forged one after it.
func BenchmarkStalledStrangers(b *testing.B) {
	for _, attack := range []struct {
		name                    string
		strangers, length, part int
	}{
		{"unsigned", 600, 256 << 10, 100 << 10},
		{"forged", 600, 256 << 10, 100 << 10},
		{"forged", 3000, 256 << 10, 100 << 10},
		{"forged-1MiB", 600, 1 << 20, 1<<20 - 1},
		{"forged-20KiB", 3000, 20 << 10, 10 << 10},
		{"forged-5KiB", 3000, 5000, 4900},
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

// stallOnce opens connections. On a signal it sends a head and part of a body on each. When the
// server closes one, it opens another, until it is stopped.
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
