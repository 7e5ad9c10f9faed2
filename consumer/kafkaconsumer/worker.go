package kafkaconsumer

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outbox-relay/outbox-relay/consumer/internal/message"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sleep"
)

// worker works the records of one partition, one after the other. Others push and halt it; mu
// guards what they share.
type worker struct {
	*Consumer
	client    *kgo.Client
	partition partition
	taking    context.Context // ends when no further record may begin
	stop      context.CancelFunc
	running   sync.WaitGroup
	pushed    chan struct{} // something was pushed
	behind    int64         // offset behind the last record that was pushed; -1: none was. hand's alone

	mu      sync.Mutex
	records []*kgo.Record
	paused  bool
	next    int64 // offset of the first record that is not done
	end     int64 // offset behind the last record of the partition; 0: nothing was pushed
	failing bool
	gone    bool // the partition is another one's, or a new one: mark no offset
}

func newWorker(c *Consumer, client *kgo.Client, p partition) *worker {
	return &worker{Consumer: c, client: client, partition: p, pushed: make(chan struct{}, 1), behind: -1}
}

// reportRemoved says which records the topic removed before they were read: the client continues
// behind them without a word. start is the offset of the first record that the partition still has.
func (w *worker) reportRemoved(start int64) {
	if w.behind < 0 {
		w.behind = w.client.CommittedOffsets()[w.partition.topic][w.partition.number].Offset // 0 for a new group, which has missed nothing
	}
	if 0 < w.behind && w.behind < start {
		w.logger().Error("kafkaconsumer: the topic removed records before they were read; let it keep them for longer, and replay their events",
			"topic", w.partition.topic, "partition", w.partition.number, "from", w.behind, "to", start-1)
	}
}

// start runs the worker until ctx ends or halt is called.
func (w *worker) start(ctx context.Context) {
	w.client.ResumeFetchPartitions(w.alone()) // a worker of the same partition may have been stopped while it had enough
	w.taking, w.stop = context.WithCancel(ctx)
	working, abandon := context.WithCancel(context.WithoutCancel(ctx))
	context.AfterFunc(w.taking, func() {
		timer := time.AfterFunc(w.cfg.DrainTimeout, abandon)
		context.AfterFunc(working, func() { timer.Stop() })
	})
	w.running.Go(func() {
		defer abandon()
		for r := w.take(); r != nil; r = w.take() {
			if !w.work(working, r) {
				return
			}
		}
	})
}

// halt has the worker take no further record. gone: it marks no offset from now on.
func (w *worker) halt(gone bool) {
	w.mu.Lock()
	w.gone = w.gone || gone
	w.mu.Unlock()
	w.stop()
}

// push gives the worker records, and has the client fetch no more of them while it has enough.
func (w *worker) push(records []*kgo.Record, end int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.end == 0 {
		w.next = records[0].Offset
	}
	w.records, w.end = append(w.records, records...), end
	w.behind = records[len(records)-1].Offset + 1
	select {
	case w.pushed <- struct{}{}:
	default:
	}
	if len(w.records) >= w.cfg.Ahead && !w.paused {
		w.paused = true
		w.client.PauseFetchPartitions(w.alone())
	}
}

// alone is the worker's partition as the client wants it.
func (w *worker) alone() map[string][]int32 {
	return map[string][]int32{w.partition.topic: {w.partition.number}}
}

// take waits for the next record. Nil: the worker is to end.
func (w *worker) take() *kgo.Record {
	for w.taking.Err() == nil {
		w.resume()
		if r := w.pop(); r != nil {
			return r
		}
		select {
		case <-w.pushed:
		case <-w.taking.Done():
		}
	}
	return nil
}

func (w *worker) pop() *kgo.Record {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.records) == 0 {
		return nil
	}
	r := w.records[0]
	w.records[0] = nil
	w.records = w.records[1:]
	return r
}

// resume has the client fetch again when half of what was enough is worked.
func (w *worker) resume() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.paused && len(w.records) <= w.cfg.Ahead/2 {
		w.paused = false
		w.client.ResumeFetchPartitions(w.alone())
	}
}

// lag returns how many records are not done, and whether the first of them has failed.
func (w *worker) lag() (waiting int64, failing bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return max(w.end-w.next, 0), w.failing
}

// done notes that a record has its result, and lets its offset be committed.
func (w *worker) done(r *kgo.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next, w.failing = r.Offset+1, false
	if !w.gone {
		w.client.MarkCommitRecords(r)
	}
}

// failed notes that a record has failed.
func (w *worker) failed(r *kgo.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next, w.failing = r.Offset, true
}

// work tries a record until that has a result, and then lets its offset be committed. It returns
// false when the worker was stopped before.
func (w *worker) work(ctx context.Context, r *kgo.Record) (finished bool) {
	header := make(http.Header, len(r.Headers))
	for _, h := range r.Headers {
		name := h.Key
		if attribute, found := strings.CutPrefix(name, "ce_"); found { // as in a request, by which it is signed
			name = "ce-" + attribute
		}
		header[name] = append(header[name], string(h.Value))
	}
	m := message.Message{Header: header, Body: r.Value, Stored: r.Timestamp}
	for attempt := 1; ; attempt++ {
		out := message.Deliver(ctx, w.receive, m)
		if out.Verdict == message.Done || out.Verdict == message.Refused && w.refuse(ctx, r, out) {
			w.done(r)
			return true
		}
		w.failed(r)
		if w.taking.Err() != nil {
			return false
		}
		wait := out.Delay(attempt, w.cfg.Schedule)
		w.logger().WarnContext(ctx, "kafkaconsumer: the record is tried again", "topic", r.Topic, "partition", r.Partition, "offset", r.Offset,
			"attempt", attempt, "status", out.Status, "problem", out.Problem, "wait", wait)
		if sleep.For(w.taking, wait) != nil {
			return false
		}
	}
}

// refuse hands a record that is refused for good to Config.Refused, and reports whether it may be
// passed.
func (w *worker) refuse(ctx context.Context, r *kgo.Record, out message.Outcome) (kept bool) {
	log := w.logger().With("topic", r.Topic, "partition", r.Partition, "offset", r.Offset, "status", out.Status, "problem", out.Problem)
	if w.cfg.Refused == nil {
		log.ErrorContext(ctx, "kafkaconsumer: the receiver refuses the record; it stays in its topic and is passed", "detail", out.Detail)
		return true
	}
	return message.Keep(ctx, log, "kafkaconsumer", "the record is tried again", func() error {
		return w.cfg.Refused(ctx, Refusal{Record: r, Status: out.Status, Problem: out.Problem, Detail: out.Detail})
	})
}
