package main

import (
	"net/http"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
	"github.com/outbox-relay/outbox-relay/internal/localnats"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func TestTakesEffectOnce(t *testing.T) {
	t.Parallel()
	program, err := localnats.Find("../../..")
	testkit.Must(t, err)
	server, err := localnats.Start(t.Context(), program, 1, "")
	testkit.Must(t, err)
	t.Cleanup(func() { testkit.Must(t, server.Stop()) })
	conn, err := nats.Connect(server.URL())
	testkit.Must(t, err)
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	testkit.Must(t, err)
	stream, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"outbox.>"}})
	testkit.Must(t, err)

	e := exampletest.Start(t, exampletest.Invoices, "NATS_URL="+server.URL())
	e.ReadsOnce(func(header http.Header, body []byte) {
		_, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: "outbox.invoice.created", Header: nats.Header(header), Data: body})
		testkit.Must(t, err)
	})
	reader, err := stream.Consumer(t.Context(), "logistics")
	testkit.Must(t, err)
	info, err := reader.Info(t.Context())
	testkit.Must(t, err)
	if info.NumPending != 0 || info.NumAckPending != 0 {
		t.Errorf("%d messages are unread and %d unacknowledged after SIGTERM", info.NumPending, info.NumAckPending)
	}
}
