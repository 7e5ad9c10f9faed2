package main

import (
	"os"
	"slices"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if slices.Contains(os.Args, "--consumer") {
		main()
		return
	}
	os.Exit(m.Run())
}

// The demonstration itself fails when an event is lost, doubled or out of order.
func TestThePlay(t *testing.T) {
	t.Parallel()
	o := options{
		Relay: "../../bin/outbox-relay", Root: "../..", Events: 600, Keys: 40, Rate: 100,
		KillLeader: 2 * time.Second, KillRelay: time.Second, KillOne: time.Second, Patience: 2 * time.Minute,
	}
	if err := o.play(t.Context()); err != nil {
		t.Fatal(err)
	}
}
