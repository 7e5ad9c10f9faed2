package measure

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// asProcess makes the test binary be a process that serves.
const asProcess = "MEASURE_AS_PROCESS"

func TestMain(m *testing.M) {
	if os.Getenv(asProcess) != "" {
		_ = Serve(context.Background(), os.Stdin, os.Stdout, serve)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func serve(ctx context.Context, name string, arg json.RawMessage) (any, error) {
	switch name {
	case "echo":
		return arg, nil
	case "wait":
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return nil, errors.New("there is no " + name)
}

func TestProcess(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), asProcess+"=1")
	p, err := Start(cmd)
	testkit.Must(t, err)
	var reply []string
	if err := p.Call("echo", []string{"a", "b"}, &reply); err != nil || strings.Join(reply, "") != "ab" {
		t.Errorf("the process answers %q, %v", reply, err)
	}
	if err := p.Call("echo", nil, nil); err != nil {
		t.Error(err)
	}
	if err := p.Call("sing", nil, nil); err == nil || err.Error() != "there is no sing" {
		t.Errorf("an unknown command is answered by %v", err)
	}
	testkit.Equal(t, "its number", p.PID(), cmd.Process.Pid)
	// A command that is under way ends with the input.
	var calling sync.WaitGroup
	calling.Go(func() { _ = p.Call("wait", nil, nil) })
	testkit.Must(t, p.in.Close())
	calling.Wait()
	if err := p.Stop(); err != nil {
		t.Error(err)
	}
	if err := p.Call("echo", nil, nil); err == nil {
		t.Error("a process that has ended answers")
	}
	if _, err := Start(exec.CommandContext(t.Context(), "/nonexistent")); err == nil {
		t.Error("a program that is none was started")
	}
}

func TestClosed(t *testing.T) {
	t.Parallel()
	seen := make(chan int, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	n, err := Closed(ctx, 3, time.Minute, func(ctx context.Context, n int) error {
		seen <- n
		if n == 300 {
			cancel()
		}
		return ctx.Err()
	})
	if n < 300 || len(seen) != n || !errors.Is(err, context.Canceled) {
		t.Errorf("%d events, %d seen, %v", n, len(seen), err)
	}
	if n, err := Closed(t.Context(), 3, 0, nil); n != 0 || err != nil {
		t.Errorf("in no time %d events, %v", n, err)
	}
}

func TestOpen(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[int]time.Time{}
	failure := errors.New("no")
	begun, err := Open(t.Context(), 4, 50, 1000, func(_ context.Context, n int) error {
		mu.Lock()
		defer mu.Unlock()
		seen[n] = time.Now()
		if n == 7 {
			return failure
		}
		return nil
	})
	if len(seen) != 50 || !errors.Is(err, failure) {
		t.Errorf("%d events, %v", len(seen), err)
	}
	for n, at := range seen {
		if at.Before(DueAt(begun, n, 1000)) {
			t.Errorf("event %d came %s early", n, DueAt(begun, n, 1000).Sub(at))
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ended, 1, 3, 1, func(context.Context, int) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("after an interrupt: %v", err)
	}
}

func TestQuantile(t *testing.T) {
	t.Parallel()
	for q, want := range map[float64]float64{0: 1, 0.5: 3, 0.99: 5, 1: 5} {
		if got := Quantile([]float64{1, 2, 3, 4, 5}, q); got != want {
			t.Errorf("the quantile %.2f is %.0f, want %.0f", q, got, want)
		}
	}
}
