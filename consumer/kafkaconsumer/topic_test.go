package kafkaconsumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/kafkaconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localkafka"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/readertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// journal keeps what a consumer logs.
type journal struct{ testkit.Buffer }

func (j *journal) count(part string) int {
	return strings.Count(j.String(), part)
}

// runLogged starts a reader with a log.
func (e *env) runLogged() (log *journal, stop func()) {
	e.Helper()
	log = &journal{}
	r := e.reader(kafkaconsumer.Config{Logger: slog.New(slog.NewTextHandler(log, nil))}, e.Receiver(readertest.Effect))
	return log, e.Start(r.Run)
}

// produceMany writes events to partition 0.
func (e *env) produceMany(name string, events int) {
	e.Helper()
	for i := range events {
		e.Write(0, consumer.Event{IdempotencyKey: fmt.Sprint(name, i)}, readertest.Secret)
	}
}

// A client that holds a topic that is gone asks for it for ever, thousands of times a second.
func TestATopicThatIsDeletedAndMadeAgain(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	e := newEnv(t, "")
	log, _ := e.runLogged()
	e.produceMany("before", 5)
	e.Effects(5)

	e.deleteTopic()
	testkit.Eventually(t, "the log to say that records are gone", func() bool { return log.count("no records") > 0 })
	e.makeTopic()

	e.produceMany("after", 20)
	e.Effects(25)
	if lines := log.count("no records"); lines > 100 {
		t.Errorf("%d lines in the log", lines)
	}
}

// Offsets of the old topic would hide the first events of the new one. Kafka before 4.1 takes
// offsets by the name of their topic, a later one by its id.
func TestATopicIsMadeAgainBehindABacklog(t *testing.T) {
	t.Parallel()
	for name, versions := range map[string]*kversion.Versions{"offsets by id": kversion.Stable(), "offsets by name": kversion.V3_9_0()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			backlog(t, kgo.MaxVersions(versions))
		})
	}
}

func backlog(t *testing.T, client kgo.Opt) {
	e := newEnv(t, "")
	log := &journal{}
	r := e.reader(kafkaconsumer.Config{Client: []kgo.Opt{client}, Logger: slog.New(slog.NewTextHandler(log, nil))}, e.Receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if event.IdempotencyKey == "before38" {
			for log.count("no records") == 0 && ctx.Err() == nil {
				<-time.After(10 * time.Millisecond)
			}
			<-time.After(time.Second) // this record ends when the client would have forgotten the old topic
		}
		return readertest.Effect(ctx, tx, event)
	}))
	e.produceMany("before", 40)
	e.Start(r.Run)
	e.Reach(38)
	e.deleteTopic()
	e.makeTopic()
	e.produceMany("after", 100)
	testkit.Eventually(t, "each event of the new topic", func() bool {
		return pgtest.Row[int](t, e.Pool, `SELECT count(*) FROM effect WHERE key LIKE 'after%'`) == 100
	})
}

// deleteTopic deletes the topic.
func (e *env) deleteTopic() {
	e.Helper()
	remove := kmsg.NewPtrDeleteTopicsRequest()
	removed := kmsg.NewDeleteTopicsRequestTopic()
	removed.Topic = kmsg.StringPtr(topic)
	remove.TopicNames, remove.Topics = []string{topic}, append(remove.Topics, removed)
	_, err := remove.RequestWith(e.Context(), e.send)
	pgtest.Must(e, err)
}

// makeTopic makes it again.
func (e *env) makeTopic() {
	e.Helper()
	create := kmsg.NewPtrCreateTopicsRequest()
	created := kmsg.NewCreateTopicsRequestTopic()
	created.Topic, created.NumPartitions, created.ReplicationFactor = topic, localkafka.Partitions, 1
	create.Topics = append(create.Topics, created)
	answer, err := create.RequestWith(e.Context(), e.send)
	pgtest.Must(e, err)
	pgtest.Must(e, kerr.ErrorForCode(answer.Topics[0].ErrorCode))
	e.send.PurgeTopicsFromProducing(topic)
}

// What a topic removed before it was read is gone for this reader, which must not continue in
// silence.
func TestRecordsThatAreRemovedBeforeTheyAreRead(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "")
	e.produceMany("never", 2)
	e.cut(2)
	e.produceMany("before", 3)
	log, stop := e.runLogged() // a new group, which misses nothing that was meant for it
	e.Effects(3)
	stop()
	if log.count("removed records") > 0 {
		t.Errorf("a new group reports removed records: %s", log)
	}

	e.produceMany("after", 5)
	e.cut(8)
	log, stop = e.runLogged()
	e.Effects(5)
	stop()
	if log.count("removed records") != 1 || log.count("from=5 to=7") != 1 {
		t.Errorf("the log does not have what was removed: %s", log)
	}
}

// cut removes the records of partition 0 before an offset, as a topic's retention does.
func (e *env) cut(before int64) {
	e.Helper()
	request := kmsg.NewPtrDeleteRecordsRequest()
	of := kmsg.NewDeleteRecordsRequestTopic()
	at := kmsg.NewDeleteRecordsRequestTopicPartition()
	of.Topic, at.Offset = topic, before
	of.Partitions = append(of.Partitions, at)
	request.Topics = append(request.Topics, of)
	answer, err := request.RequestWith(e.Context(), e.send)
	pgtest.Must(e, err)
	pgtest.Must(e, kerr.ErrorForCode(answer.Topics[0].Partitions[0].ErrorCode))
}
