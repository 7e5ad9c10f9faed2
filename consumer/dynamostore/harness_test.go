package dynamostore_test

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"

	"github.com/outbox-relay/outbox-relay/consumer/dynamostore"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/consumer/storetest"
	"github.com/outbox-relay/outbox-relay/internal/localserver"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// dynalite is where make test-stores installs the emulator, seen from this package.
const dynalite = "../../bin/dynalite/node_modules/dynalite/cli.js"

// servers are emulators that keep their tables in a directory.
var servers = testkit.Servers{
	Need: func(t testing.TB) {
		if _, err := os.Stat(dynalite); err != nil {
			t.Fatal("these tests need dynalite; install it with make test-stores, or: npm install --prefix bin/dynalite dynalite@3.2.2")
		}
		if _, err := exec.LookPath("node"); err != nil {
			t.Fatal("these tests need Node.js 20 or later; install it: apt-get install nodejs")
		}
	},
	Command: func(dir string, _ ...string) []string {
		program, err := filepath.Abs(dynalite)
		if err != nil {
			panic(err)
		}
		// What it calls a port may be the path of a socket.
		return []string{"node", program, "--port", filepath.Join(dir, "socket"), "--path", filepath.Join(dir, "tables"), "--createTableMs", "0"}
	},
}

func TestMain(m *testing.M) { servers.Main(m) }

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
		HTTPClient:   &http.Client{Transport: transport, Timeout: testkit.Patience},
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: "test", SecretAccessKey: "test"}, nil
		}),
		RetryMaxAttempts: 2,
	})
}

func create(t testing.TB, s *localserver.Server, table string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	testkit.Must(t, dynamostore.CreateTable(ctx, client(t, s), table))
}

// memory is what the receivers of one test share.
func memory(t testing.TB, s *localserver.Server, table string) storetest.Memory {
	create(t, s, table)
	return storetest.Memory{
		Open:  func() store.Store { return dynamostore.New(client(t, s), table) },
		Stop:  s.Kill,
		Start: func() { testkit.Restart(t, s) },
	}
}
