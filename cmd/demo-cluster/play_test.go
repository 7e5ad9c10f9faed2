package main

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) {
	if slices.Contains(os.Args, "--consumer") || slices.Contains(os.Args, "--brokers") {
		main()
		return
	}
	os.Exit(m.Run())
}

// The demonstration itself fails when an event is lost, doubled or out of order.
func TestThePlay(t *testing.T) {
	t.Parallel()
	for _, log := range []string{"nats", "kafka"} {
		t.Run(log, func(t *testing.T) {
			t.Parallel()
			o := options{
				Relay: "../../bin/outbox-relay", Root: "../..", Log: log, Events: 600, Keys: 40, Rate: 100, Partitions: 8, Receiver: "logistics",
				KillLeader: 2 * time.Second, KillRelay: time.Second, KillOne: time.Second, Patience: 2 * time.Minute,
			}
			testkit.Must(t, o.play(t.Context()))
		})
	}
}
