package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func TestTakesEffectOnce(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "invoices"))
	testkit.Must(t, err)
	t.Cleanup(cluster.Close)
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...))
	testkit.Must(t, err)
	t.Cleanup(client.Close)

	e := exampletest.Start(t, exampletest.Invoices, "KAFKA_BROKERS="+strings.Join(cluster.ListenAddrs(), ","))
	written := int64(0)
	e.ReadsOnce(func(header http.Header, body []byte) {
		record := &kgo.Record{Topic: "invoices", Value: body}
		for name := range header {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: name, Value: []byte(header.Get(name))})
		}
		testkit.Must(t, client.ProduceSync(t.Context(), record).FirstErr())
		written++
	})
	request := kmsg.NewPtrOffsetFetchRequest()
	request.Group = "logistics"
	committed, err := request.RequestWith(t.Context(), client)
	testkit.Must(t, err)
	if offset := committed.Topics[0].Partitions[0].Offset; offset != written {
		t.Errorf("offset %d is committed after SIGTERM, want %d", offset, written)
	}
}
