package main

import (
	"net/http"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
	"github.com/outbox-relay/outbox-relay/internal/localnats"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func TestTakesEffectOnce(t *testing.T) {
	t.Parallel()
	program, err := localnats.Find("../../..")
	must(t, err)
	server, err := localnats.Start(t.Context(), program, 1, "")
	must(t, err)
	t.Cleanup(func() { must(t, server.Stop()) })
	conn, err := nats.Connect(server.URL())
	must(t, err)
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	must(t, err)
	stream, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"outbox.>"}})
	must(t, err)

	e := exampletest.Start(t, exampletest.Invoices, "NATS_URL="+server.URL())
	e.ReadsOnce(func(header http.Header, body []byte) {
		_, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: "outbox.invoice.created", Header: nats.Header(header), Data: body})
		must(t, err)
	})
	reader, err := stream.Consumer(t.Context(), "logistics")
	must(t, err)
	info, err := reader.Info(t.Context())
	must(t, err)
	if info.NumPending != 0 || info.NumAckPending != 0 {
		t.Errorf("%d messages are unread and %d unacknowledged after SIGTERM", info.NumPending, info.NumAckPending)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
