package kafkatest

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A topic's limit is that of a batch. The events of one that is larger must not fail: alone, each of them fits.
func TestRecordsThatFitAreNotTooLargeTogether(t *testing.T) {
	t.Parallel()
	address, _ := start(t, "small")
	c := kafkapost.New(config(address))
	t.Cleanup(c.CloseIdleConnections)
	results := make([]policy.Result, 100)
	var sending sync.WaitGroup
	for i := range results {
		sending.Go(func() {
			results[i] = publish(t, c, topic, kafkapost.Message{
				EventType: "paid", IdempotencyKey: fmt.Sprint("k", i), OrderingKey: "o", Payload: bytes.Repeat([]byte("1"), 600),
			})
		})
	}
	sending.Wait()
	failed := map[policy.Reason]int{}
	for _, v := range results {
		if v.Reason != policy.ReasonOK {
			failed[v.Reason]++
		}
	}
	if len(failed) > 0 {
		t.Errorf("of %d records that fit, these failed: %v", len(results), failed)
	}
}

// A record that is larger than the batches of others is sent all the same, as far as the topic takes it.
func TestLargestRecordOfADefaultBroker(t *testing.T) {
	t.Parallel()
	address, _ := start(t, "")
	c := kafkapost.New(config(address))
	t.Cleanup(c.CloseIdleConnections)
	for size, want := range map[int]policy.Reason{1_040_000: policy.ReasonOK, 1_060_000: policy.ReasonTooLarge} {
		if v := publish(t, c, topic, kafkapost.Message{EventType: "paid", IdempotencyKey: "k", Payload: bytes.Repeat([]byte("1"), size)}); v.Reason != want {
			t.Errorf("%d bytes: %+v, want %s", size, v, want)
		}
	}
}
