// Command demo-cluster shows the promises of outbox-relay over a distributed log: a producer, a
// relay, a JetStream cluster of three servers and three consumers, each its own process, while
// the stream's leader, the relay and the consumers are killed.
//
//	producer ──tx──▶ [outbox] ◀── outbox-relay ──publish──▶ NATS n1 n2 n3 ──pull──▶ consumer ×3 ──tx──▶ [shipments, processed_events]
//
// In the end both databases are compared with each other and with the stream. With --log kafka the
// log is kfake, an imitation of Kafka's brokers.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
)

// options are the command line.
type options struct {
	Relay      string        `default:"bin/outbox-relay" placeholder:"FILE" help:"The outbox-relay to play with."`
	Root       string        `default:"." placeholder:"DIR" help:"The repository, in whose bin make builds a NATS server."`
	Log        string        `default:"nats" enum:"nats,kafka" help:"What carries the events: nats, or kafka, which is an imitation of its brokers."`
	Events     int           `default:"5000" help:"Events to commit."`
	Keys       int           `default:"200" help:"Ordering keys that they have."`
	Rate       float64       `default:"400" help:"Events per second. 0: as fast as possible."`
	KillLeader time.Duration `default:"5s" help:"How often the server that leads the stream is killed; with kafka all brokers."`
	KillRelay  time.Duration `default:"2s" help:"How often the relay is killed."`
	KillOne    time.Duration `name:"kill-consumer" default:"3s" help:"How often a consumer is killed, in turn after its commit, before its acknowledgement."`
	Patience   time.Duration `default:"3m" help:"How long to wait for the last effect."`
	Consumer   bool          `hidden:"" help:"Play a consumer."`
	URL        string        `hidden:"" help:"Of the servers, for a consumer."`
	Database   string        `hidden:"" help:"Of a consumer."`
	DieAfter   int           `hidden:"" help:"After how many effects a consumer dies: after the commit, before the acknowledgement."`
	Partitions int           `default:"8" hidden:"" help:"Over which ordering keys are spread, and which the consumers share."`
	Receiver   string        `default:"logistics" hidden:"" help:"Name of a consumer's receiver, and of its group or durable consumers."`
	Durable    bool          `hidden:"" help:"Let PostgreSQL write to the disk at each commit."`
	Brokers    []string      `hidden:"" help:"Play Kafka's brokers on these ports."`
	Dir        string        `hidden:"" help:"Where the brokers keep what they have."`
	Secret     string        `hidden:"" env:"DEMO_SECRET" help:"Signing secret."`
}

const description = `A producer commits events, outbox-relay publishes them to a JetStream cluster of three servers, three consumers work them. The stream's
leader, the relay and the consumers are killed on the way; in the end the databases are compared. It needs PostgreSQL's programs and a NATS
server (make nats-server), takes about half a minute and leaves nothing behind.`

func main() {
	var o options
	kong.Parse(&o, kong.Name("demo-cluster"), kong.Description(description))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	run := o.play
	switch {
	case o.Consumer:
		run = o.consume
	case len(o.Brokers) > 0:
		run = o.imitate
	}
	if err := run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "demo-cluster: %v\n", err)
		stop()
		os.Exit(1)
	}
}
