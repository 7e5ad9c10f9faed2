package consumer_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// receiverDSN makes the test binary a receiver for the database that it names.
const receiverDSN = "OUTBOX_TEST_RECEIVER_DSN"

// TestKilledBetweenCommitAndAnswer kills a receiver at the worst moment, in its own process: the effect is committed and
// the client does not know. The redelivery must find that out.
func TestKilledBetweenCommitAndAnswer(t *testing.T) {
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{}, effect) // the receiver that comes after the crash
	binary, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	receiver := exec.CommandContext(t.Context(), binary)
	receiver.Env = append(os.Environ(), receiverDSN+"="+e.dsn)
	receiver.Stderr = os.Stderr
	out, err := receiver.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := receiver.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	url, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}

	doomed := e.newRequest("k", "{}")
	if doomed.URL, err = doomed.URL.Parse(strings.TrimSpace(url)); err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() {
		_, err := e.try(doomed)
		sent <- err
	}()
	if line, err := lines.ReadString('\n'); err != nil || line != "processed\n" {
		t.Fatalf("the receiver said %q, %v", line, err)
	}
	if err := receiver.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := receiver.Wait(); err == nil || err.Error() != "signal: killed" {
		t.Fatalf("the receiver ended with %v", err)
	}
	if err := <-sent; err == nil {
		t.Fatal("the client got an answer")
	}

	wantReplayed(t, e.post("k", "{}"), 201, `{"done":"k"}`)
	e.wantRows("k", 1, 1)
}

// receiveAndHang is the receiver to be killed. It says where it listens, and when it has committed; then it waits for the
// end, holding back the answer.
func receiveAndHang(dsn string) {
	pool, err := pgxpool.New(context.Background(), dsn)
	if err != nil {
		panic(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	middleware := consumer.Middleware(pool, consumer.Config{
		Secrets: []string{secretText},
		Observer: consumer.ObserverFunc(func(_ context.Context, r consumer.Report) {
			fmt.Println(r.Result)
			select {}
		}),
	})
	fmt.Printf("http://%s\n", listener.Addr())
	panic(http.Serve(listener, middleware(effect(&env{flavour: flavours[0]}))))
}
