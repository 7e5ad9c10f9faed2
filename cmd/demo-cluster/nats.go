package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/consumer/natsconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localnats"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

const (
	stream  = "OUTBOX"
	subject = "outbox.{partition}.>"
)

// overNATS is a stream of three replicas on three servers, each a process.
type overNATS struct {
	options *options
	cluster *localnats.Cluster
	js      jetstream.JetStream
	kills   atomic.Int64
}

// open implements [eventLog].
func (l *overNATS) open(ctx context.Context) error {
	fmt.Println("starting three NATS servers")
	program, err := localnats.Find(l.options.Root)
	if err != nil {
		return err
	}
	if l.cluster, err = localnats.Start(ctx, program, 3, ""); err != nil {
		return err
	}
	if l.js, err = openJetStream(l.cluster.URL()); err != nil {
		return err
	}
	for range 30 {
		// A request that arrives before there is a leader gets no answer at all.
		asking, cancel := context.WithTimeout(ctx, time.Second)
		_, err = l.js.CreateStream(asking, jetstream.StreamConfig{Name: stream, Subjects: []string{"outbox.>"}, Replicas: 3, Duplicates: 2 * time.Minute})
		cancel()
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("create stream: %w", err)
	}
	return nil
}

func openJetStream(url string) (jetstream.JetStream, error) {
	conn, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond), nats.RetryOnFailedConnect(true))
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	js, err := jetstream.New(conn)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	return js, nil
}

// url implements [eventLog].
func (l *overNATS) url() string { return l.cluster.URL() }

// settings implements [eventLog].
func (l *overNATS) settings() string {
	return fmt.Sprintf("nats: {subject: 'outbox.{partition}.{type}', partitions: %d, stream: %s}", l.options.Partitions, stream)
}

// disturb implements [eventLog]: it kills the server that leads the stream, and starts it again
// when another one has taken over.
func (l *overNATS) disturb(ctx context.Context) error {
	found, err := l.js.Stream(ctx, stream)
	if err != nil || found.CachedInfo().Cluster == nil {
		return nil // there is no leader
	}
	number, err := strconv.Atoi(strings.TrimPrefix(found.CachedInfo().Cluster.Leader, "n"))
	if err != nil {
		return nil
	}
	l.cluster.Kill(number - 1)
	l.kills.Add(1)
	_ = sleep.For(ctx, l.options.KillLeader/4)
	if err := l.cluster.Restart(context.WithoutCancel(ctx), number-1); err != nil {
		return fmt.Errorf("start n%d again: %w", number, err)
	}
	return nil
}

// disturbed implements [eventLog].
func (l *overNATS) disturbed() (what string, n int64, remark string) {
	return "leaders of the stream killed", l.kills.Load(), ""
}

// stored implements [eventLog].
func (l *overNATS) stored(ctx context.Context) (int, error) {
	found, err := l.js.Stream(ctx, stream)
	if err != nil {
		return 0, err
	}
	return int(found.CachedInfo().State.LastSeq), nil
}

// close implements [eventLog].
func (l *overNATS) close() error {
	var errs []error
	if l.js != nil {
		l.js.Conn().Close()
	}
	if l.cluster != nil {
		errs = append(errs, l.cluster.Stop())
	}
	return errors.Join(errs...)
}

// readNATS returns a reader of the stream, as a user of natsconsumer makes it.
func (o *options) readNATS(receive http.Handler) (reader, func(), error) {
	js, err := openJetStream(o.URL)
	if err != nil {
		return nil, nil, err
	}
	events, err := natsconsumer.New(js, natsconsumer.Config{
		Stream: stream, Durable: o.Receiver, Subject: subject, Partitions: o.Partitions, AckWait: 2 * time.Second,
		Schedule: []time.Duration{200 * time.Millisecond},
	}, receive)
	return events, js.Conn().Close, err
}
