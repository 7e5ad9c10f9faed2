package inbox_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// chaosLoad brings events to the members of the cast that listen, as a relay does: what is not
// acknowledged is brought again, and an event of an ordering key waits until the one before it is
// acknowledged.
type chaosLoad struct {
	stage  *chaosStage
	client *http.Client
	begun  time.Time
	events []*brought // in the order in which they are brought

	posts, unanswered, refused, duplicates, reused atomic.Int64

	mu      sync.Mutex // guards what is noted of the events
	known   []*brought // that are acknowledged
	strange []string
}

// Each of every so many events, counted from a number that no other kind has.
const (
	keyedEvery  = 2   // has an ordering key
	burst       = 8   // keyed ones in a row have the same, so that each comes while the one before it is worked
	ignoreEvery = 200 // is ignored by its handler
	failEvery   = 200 // fails for good; of those without an ordering key
	poisoned    = 5   // ordering keys have an event in them that fails for good
	poisonAt    = 3   // its sequence
)

func newChaosLoad(s *chaosStage, events, keys int) *chaosLoad {
	l := &chaosLoad{stage: s, client: &http.Client{
		Timeout:   2 * time.Second, // beyond which a frozen process is given up
		Transport: &http.Transport{MaxIdleConnsPerHost: 64},
	}}
	s.t.Cleanup(l.client.CloseIdleConnections)
	types := []string{"invoice.created", "invoice.paid", "invoice.voided", "parcel.sent"}
	sequences := map[string]int64{}
	for i := range events {
		e := &brought{Key: "evt-" + strconv.Itoa(i), Type: types[i/keyedEvery%len(types)], Bidding: toSucceed}
		if i%keyedEvery == 1 {
			n := i / keyedEvery / burst % keys
			e.OrderingKey = "order-" + strconv.Itoa(n)
			sequences[e.OrderingKey]++
			e.Sequence = sequences[e.OrderingKey]
			if n < poisoned && e.Sequence == poisonAt {
				e.Bidding = toBlock
			}
		} else if i%failEvery == failEvery/2 {
			e.Bidding = toFail
		}
		if i%ignoreEvery == 37 && e.Bidding == toSucceed {
			e.Bidding = toIgnore
		}
		l.events = append(l.events, e)
	}
	return l
}

// bring brings all events, at most perSecond, over so many lanes at once. All events of an ordering
// key share a lane.
func (l *chaosLoad) bring(ctx context.Context, lanes, perSecond int) {
	l.begun = time.Now()
	queues := make([][]int, lanes)
	for i, e := range l.events {
		lane := i % lanes
		if e.OrderingKey != "" {
			number, _ := strconv.Atoi(strings.TrimPrefix(e.OrderingKey, "order-"))
			lane = number % lanes
		}
		queues[lane] = append(queues[lane], i)
	}
	var all sync.WaitGroup
	for _, queue := range queues {
		all.Go(func() {
			for _, i := range queue {
				due := l.begun.Add(time.Duration(i) * time.Second / time.Duration(perSecond))
				select {
				case <-time.After(time.Until(due)):
				case <-ctx.Done():
					return
				}
				l.deliver(ctx, l.events[i])
				if i%neighbourEvery == 0 {
					l.deliverBeside(ctx, l.events[i])
				}
			}
		})
	}
	all.Wait()
}

// deliver brings one event until it is acknowledged.
func (l *chaosLoad) deliver(ctx context.Context, e *brought) {
	body := e.body()
	for attempt := 1; ctx.Err() == nil; attempt++ {
		switch status, text := l.post(ctx, e, body, attempt); status {
		case http.StatusAccepted, http.StatusOK:
			l.mu.Lock()
			defer l.mu.Unlock()
			if status == http.StatusAccepted {
				e.accepted++
			}
			e.acknowledged = true
			l.known = append(l.known, e)
			return
		case 0:
			l.unanswered.Add(1)
		case http.StatusConflict, http.StatusServiceUnavailable, http.StatusInternalServerError:
			l.refused.Add(1)
		default:
			l.wonder("%s was answered %d %s", e.Key, status, text)
			return
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// deliverBeside brings one event to each neighbour until it is acknowledged, and then once more, as
// a duplicate.
func (l *chaosLoad) deliverBeside(ctx context.Context, e *brought) {
	body := e.body()
	e.beside = map[string]bool{}
	for path := range neighbours {
		for attempt := 1; ctx.Err() == nil && !e.beside[path]; attempt++ {
			status, text := l.postTo(ctx, path, e, body, attempt)
			switch status {
			case http.StatusNoContent:
				e.beside[path] = true
			case 0, http.StatusConflict, http.StatusServiceUnavailable, http.StatusInternalServerError:
			default:
				l.wonder("%s was answered %d %s by %s", e.Key, status, text, path)
				return
			}
		}
		switch status, text := l.postTo(ctx, path, e, body, 9); status {
		case http.StatusNoContent, 0, http.StatusServiceUnavailable:
		default:
			l.wonder("%s: a duplicate was answered %d %s by %s", e.Key, status, text, path)
		}
	}
}

// repeat brings acknowledged events again and again until ctx ends, and now and then other content
// under their keys.
func (l *chaosLoad) repeat(ctx context.Context, pause time.Duration) {
	for {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
		l.mu.Lock()
		var e *brought
		if len(l.known) > 0 {
			// Half of them from the youngest, which are being worked.
			i := rand.IntN(len(l.known))
			if rand.IntN(2) == 0 {
				i = max(0, len(l.known)-1-rand.IntN(50))
			}
			e = l.known[i]
		}
		l.mu.Unlock()
		if e == nil {
			continue
		}
		body, want, count := e.body(), http.StatusOK, &l.duplicates
		if rand.IntN(20) == 0 {
			body, want, count = `{"another":"content"}`, http.StatusUnprocessableEntity, &l.reused
		}
		switch status, text := l.post(ctx, e, body, 2); status {
		case want:
			count.Add(1)
		case 0, http.StatusServiceUnavailable:
		default:
			l.wonder("%s: a duplicate was answered %d %s, not %d", e.Key, status, text, want)
			if status == http.StatusAccepted {
				l.mu.Lock()
				e.accepted++
				l.mu.Unlock()
			}
		}
	}
}

func (l *chaosLoad) wonder(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.strange = append(l.strange, fmt.Sprintf(format, args...))
}

func (e *brought) body() string {
	body, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain fields always encode
	}
	return string(body)
}

// post sends an event to some member of the cast. The status is 0 when there is no answer, or no
// member to ask.
func (l *chaosLoad) post(ctx context.Context, e *brought, body string, attempt int) (status int, text string) {
	return l.postTo(ctx, "", e, body, attempt)
}

func (l *chaosLoad) postTo(ctx context.Context, path string, e *brought, body string, attempt int) (status int, text string) {
	url := l.stage.anyone()
	if url == "" {
		return 0, ""
	}
	l.posts.Add(1)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, strings.NewReader(body))
	if err != nil {
		panic(err) // the address is a listener's
	}
	r.GetBody = nil // the transport must not repeat a request on its own
	signAs(r.Header, e, body, attempt)
	resp, err := l.client.Do(r)
	if err != nil {
		return 0, ""
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, ""
	}
	return resp.StatusCode, string(answer)
}

// signAs sets the headers with which a relay sends the event.
func signAs(h http.Header, e *brought, body string, attempt int) {
	h.Set("Content-Type", "application/json")
	h.Set(webhook.IdempotencyKey, e.Key)
	h.Set(webhook.EventType, e.Type)
	h.Set(webhook.EventVersion, "1")
	h.Set(webhook.CreatedAt, time.Now().UTC().Format(time.RFC3339Nano))
	h.Set(webhook.Attempt, strconv.Itoa(attempt))
	if e.OrderingKey != "" {
		h.Set(webhook.OrderingKey, e.OrderingKey)
		h.Set(webhook.Sequence, strconv.FormatInt(e.Sequence, 10))
	}
	webhook.Sign(h, []byte(body), time.Now(), receivertest.Secret())
}
