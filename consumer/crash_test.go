package consumer_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// TestKilledBetweenCommitAndAnswer kills a receiver at the worst moment, in its own process: the effect is committed and
// the client does not know. The redelivery must find that out.
func TestKilledBetweenCommitAndAnswer(t *testing.T) {
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{}, effect) // the receiver that comes after the crash
	receiver := launchFor(t, "hang", e.dsn)
	doomed := e.newRequestTo(receiver.wantLine(t), "k", "{}")
	sent := make(chan error, 1)
	go func() {
		_, err := e.try(doomed)
		sent <- err
	}()
	if line := receiver.wantLine(t); line != "processed" {
		t.Fatalf("the receiver said %q", line)
	}
	receiver.kill()
	if !receiver.killed() {
		t.Fatalf("the receiver ended with %v", receiver.cmd.ProcessState)
	}
	if err := <-sent; err == nil {
		t.Fatal("the client got an answer")
	}

	wantReplayed(t, e.post("k", "{}"), 201, "")
	e.wantRows("k", 1, 1)
}

// receiveAndHang is the receiver to be killed. It says where it listens, and when it has committed; then it waits for the
// end, holding back the answer.
func receiveAndHang(p *player) {
	middleware := consumer.Must(consumer.Middleware(p.pool(), consumer.Config{
		Receiver: "test",
		Secrets:  []string{secretText},
		Observe: func(_ context.Context, r consumer.Report) {
			fmt.Println(r.Result)
			select {}
		},
	}))
	p.serve(middleware(effect(&env{flavour: flavours[0]})))
}
