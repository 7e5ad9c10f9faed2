package dynamostore_test

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"

	"github.com/outbox-relay/outbox-relay/consumer/dynamostore"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/consumer/storetest"
	"github.com/outbox-relay/outbox-relay/internal/localserver"
)

// patience ends a test that would hang. No assertion depends on it.
const patience = time.Minute

// dynalite is where make test-stores installs the emulator.
const dynalite = "../../bin/dynalite/node_modules/dynalite/cli.js"

// shared is the emulator of all tests that leave it running.
var shared struct {
	once   sync.Once
	server *localserver.Server
	err    error
	tests  atomic.Int64
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.server != nil {
		if err := shared.server.Stop(); err != nil {
			panic(err)
		}
	}
	os.Exit(code)
}

// start runs an emulator that keeps its tables in a directory.
func start(ctx context.Context, program string) (*localserver.Server, error) {
	return localserver.Start(ctx, func(dir string) []string {
		// What it calls a port may be the path of a socket.
		return []string{"node", program, "--port", filepath.Join(dir, "socket"), "--path", filepath.Join(dir, "tables"), "--createTableMs", "0"}
	})
}

func needDynalite(t testing.TB) string {
	t.Helper()
	program, err := filepath.Abs(dynalite)
	must(t, err)
	if _, err := os.Stat(program); err != nil {
		t.Fatal("these tests need dynalite; install it with make test-stores, or: npm install --prefix bin/dynalite dynalite@3.2.2")
	}
	if _, err := exec.LookPath("node"); err != nil {
		t.Fatal("these tests need Node.js 20 or later; install it: apt-get install nodejs")
	}
	return program
}

// server is an emulator for t alone.
func server(t testing.TB) *localserver.Server {
	t.Helper()
	program := needDynalite(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := start(ctx, program)
	must(t, err)
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// common is an emulator that other tests use too, and the name of a table for t alone.
func common(t testing.TB) (*localserver.Server, string) {
	t.Helper()
	program := needDynalite(t)
	shared.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		shared.server, shared.err = start(ctx, program)
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server, "test" + strconv.FormatInt(shared.tests.Add(1), 10)
}

// client connects to a server until t ends.
func client(t testing.TB, s *localserver.Server) *dynamodb.Client {
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", s.Socket())
		},
		MaxIdleConnsPerHost: 100,
	}
	t.Cleanup(transport.CloseIdleConnections)
	return dynamodb.New(dynamodb.Options{
		BaseEndpoint: aws.String("http://dynalite"),
		Region:       "eu-central-1",
		HTTPClient:   &http.Client{Transport: transport, Timeout: patience},
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: "test", SecretAccessKey: "test"}, nil
		}),
		RetryMaxAttempts: 2,
	})
}

func create(t testing.TB, s *localserver.Server, table string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must(t, dynamostore.CreateTable(ctx, client(t, s), table))
}

// memory is what the receivers of one test share.
func memory(t testing.TB, s *localserver.Server, table string) storetest.Memory {
	create(t, s, table)
	return storetest.Memory{
		Open: func() store.Store { return dynamostore.New(client(t, s), table) },
		Stop: s.Kill,
		Start: func() {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			must(t, s.Restart(ctx))
		},
	}
}

// must ends the test when err is not nil.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
