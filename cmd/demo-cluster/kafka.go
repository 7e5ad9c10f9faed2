package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outbox-relay/outbox-relay/consumer/kafkaconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localserver"
)

const (
	topic   = "outbox"
	brokers = 3
	// leaderMoves is how often each partition gets another leader.
	leaderMoves = 700 * time.Millisecond
)

// overKafka is a topic of kfake, an imitation of three brokers in one process: all of them die
// together, and their leaders move.
type overKafka struct {
	options *options
	server  *localserver.Server
	ports   []string
	kills   atomic.Int64
}

// open implements [eventLog].
func (l *overKafka) open(ctx context.Context) (err error) {
	fmt.Println("starting kfake, an imitation of three Kafka brokers")
	if l.ports, err = localserver.FreePorts(brokers); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	l.server, err = localserver.StartAt(ctx, l.ports[0], func(dir string) []string {
		return []string{
			self, "--brokers", strings.Join(l.ports, ","), "--dir", dir, "--partitions", strconv.Itoa(l.options.Partitions), "--kill-leader", l.options.KillLeader.String(),
		}
	})
	return err
}

// url implements [eventLog].
func (l *overKafka) url() string {
	return "kafka://127.0.0.1:" + strings.Join(l.ports, ",127.0.0.1:")
}

// settings implements [eventLog].
func (l *overKafka) settings() string { return "kafka: {topic: " + topic + "}" }

// disturb implements [eventLog]: it kills the brokers, and starts them again with what they had
// written.
func (l *overKafka) disturb(ctx context.Context) error {
	l.server.Kill()
	l.kills.Add(1)
	if err := l.server.Restart(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("start the brokers again: %w", err)
	}
	return nil
}

// disturbed implements [eventLog].
func (l *overKafka) disturbed() (what string, n int64, remark string) {
	return "times that all brokers were killed", l.kills.Load(), fmt.Sprintf("and all leaders moved every %v", leaderMoves)
}

// stored implements [eventLog].
func (l *overKafka) stored(ctx context.Context) (n int, err error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(seeds(l.url())...))
	if err != nil {
		return 0, fmt.Errorf("open Kafka: %w", err)
	}
	defer client.Close()
	request := kmsg.NewPtrListOffsetsRequest()
	request.ReplicaID = -1
	wanted := kmsg.NewListOffsetsRequestTopic()
	wanted.Topic = topic
	for i := range l.options.Partitions {
		partition := kmsg.NewListOffsetsRequestTopicPartition()
		partition.Partition, partition.Timestamp = int32(i), -1 // the end
		wanted.Partitions = append(wanted.Partitions, partition)
	}
	request.Topics = append(request.Topics, wanted)
	answer, err := request.RequestWith(ctx, client)
	if err != nil {
		return 0, fmt.Errorf("ask for the ends of partitions: %w", err)
	}
	for _, found := range answer.Topics {
		for _, partition := range found.Partitions {
			if err := kerr.ErrorForCode(partition.ErrorCode); err != nil {
				return 0, fmt.Errorf("ask for the end of partition %d: %w", partition.Partition, err)
			}
			n += int(partition.Offset)
		}
	}
	return n, nil
}

// close implements [eventLog].
func (l *overKafka) close() error {
	if l.server == nil {
		return nil
	}
	return l.server.Stop()
}

// seeds returns the brokers of a URL.
func seeds(url string) []string {
	return strings.Split(strings.TrimPrefix(url, "kafka://"), ",")
}

// readKafka returns a reader of the topic, as a user of kafkaconsumer makes it.
func (o *options) readKafka(receive http.Handler) (reader, func(), error) {
	events, err := kafkaconsumer.New(kafkaconsumer.Config{
		Group: o.Receiver, Topics: []string{topic}, Schedule: []time.Duration{200 * time.Millisecond}, DrainTimeout: time.Second,
		// Its partitions go to others soon after a process was killed.
		Client: []kgo.Opt{kgo.SeedBrokers(seeds(o.URL)...), kgo.SessionTimeout(2 * time.Second), kgo.HeartbeatInterval(300 * time.Millisecond)},
	}, receive)
	return events, func() {}, err
}

// imitate is the brokers, in their own process. They keep what they have acknowledged.
func (o *options) imitate(ctx context.Context) error {
	var ports []int
	for _, text := range o.Brokers {
		port, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("port of a broker: %w", err)
		}
		ports = append(ports, port)
	}
	cluster, err := kfake.NewCluster(kfake.NumBrokers(len(ports)), kfake.Ports(ports...), kfake.SeedTopics(int32(o.Partitions), topic),
		kfake.DataDir(o.Dir), kfake.SyncWrites(), kfake.GroupMinSessionTimeout(time.Second))
	if err != nil {
		return fmt.Errorf("start brokers: %w", err)
	}
	defer cluster.Close()
	if o.KillLeader == 0 { // a measurement
		<-ctx.Done()
		return nil
	}
	move := time.NewTicker(leaderMoves)
	defer move.Stop()
	faults := cluster.Fault()
	for {
		select {
		case <-move.C:
			cluster.ShufflePartitionLeaders()
			// One batch is stored and not answered, another one is refused for now. Faults that met
			// nothing are not kept: they would add up while the relay tries rarely, and in the end
			// refuse it for ever.
			faults.Remove()
			faults = cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: topic, Err: kerr.RequestTimedOut},
				kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: topic, Err: kerr.NotEnoughReplicas})
		case <-ctx.Done():
			return nil
		}
	}
}
