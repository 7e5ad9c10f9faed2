package kafkatest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"os"
	"os/signal"
	"strconv"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/localserver"
)

const topic = "invoices"

func TestMain(m *testing.M) {
	if len(os.Args) == 5 && os.Args[1] == "broker" {
		serve(os.Args[2], os.Args[3], os.Args[4])
		return
	}
	pgtest.RunTests(m)
}

// faults of a broker, by the mode that a test asks for.
func faults(mode string) ([]kfake.Fault, []kfake.Opt) {
	produce := func(err *kerr.Error) ([]kfake.Fault, []kfake.Opt) {
		return []kfake.Fault{{Keys: []kmsg.Key{kmsg.Produce}, Topic: topic, Err: err, Count: -1}}, nil
	}
	switch mode {
	case "no rights":
		return produce(kerr.TopicAuthorizationFailed)
	case "policy":
		return produce(kerr.PolicyViolation)
	case "replicas":
		return produce(kerr.NotEnoughReplicas)
	case "storage":
		return produce(kerr.KafkaStorageError)
	case "hiccup":
		return []kfake.Fault{{Keys: []kmsg.Key{kmsg.Produce}, Topic: topic, Err: kerr.NotLeaderForPartition, Count: 1}}, nil
	case "applied":
		return []kfake.Fault{{Keys: []kmsg.Key{kmsg.Produce}, Topic: topic, Err: kerr.NotEnoughReplicasAfterAppend, Count: 1}}, nil
	case "small":
		return nil, []kfake.Opt{kfake.BrokerConfigs(map[string]string{"message.max.bytes": "2000"})}
	case "sasl":
		return nil, []kfake.Opt{kfake.EnableSASL(), kfake.Superuser("SCRAM-SHA-256", "relay", "right"), kfake.Superuser("PLAIN", "relay", "right")}
	case "acl":
		return nil, []kfake.Opt{
			kfake.EnableSASL(), kfake.EnableACLs(), kfake.Superuser("PLAIN", "root", "r"),
			kfake.User("PLAIN", "relay", "right", kfake.ACL{
				Resource: kmsg.ACLResourceTypeTopic, Name: topic, Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: kmsg.ACLOperationDescribe, Allow: true,
			}),
		}
	case "refuses":
		_, options := faults("sasl")
		return []kfake.Fault{{Keys: []kmsg.Key{kmsg.SASLAuthenticate}, TopLevel: true, Err: kerr.SaslAuthenticationFailed, Count: -1}}, options
	case "tls":
		return nil, []kfake.Opt{kfake.TLS(&tls.Config{Certificates: []tls.Certificate{selfSigned()}})}
	}
	return nil, nil
}

// serve is a broker in a process of its own.
func serve(port, dir, mode string) {
	number, err := strconv.Atoi(port)
	if err != nil {
		panic(err)
	}
	fault, options := faults(mode)
	cluster, err := kfake.NewCluster(append(options, kfake.NumBrokers(1), kfake.Ports(number), kfake.SeedTopics(4, topic), kfake.DataDir(dir), kfake.SyncWrites())...)
	if err != nil {
		panic(err)
	}
	cluster.Fault(fault...)
	if mode == "silent" {
		cluster.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) { select {} })
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, os.Interrupt)
	<-end
}

// start runs a broker and returns its address.
func start(t *testing.T, mode string) (address string, broker *localserver.Server) {
	t.Helper()
	address = freeAddress(t)
	return address, startAt(t, address, mode)
}

// startAt runs a broker at an address.
func startAt(t *testing.T, address, mode string) (broker *localserver.Server) {
	t.Helper()
	_, port, err := net.SplitHostPort(address)
	must(t, err)
	program, err := os.Executable()
	must(t, err)
	broker, err = localserver.StartAt(t.Context(), port, func(dir string) []string { return []string{program, "broker", port, dir, mode} })
	must(t, err)
	t.Cleanup(func() { must(t, broker.Stop()) })
	return broker
}

// freeAddress returns an address at which nothing listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, listener.Close())
	return listener.Addr().String()
}

// selfSigned is a certificate that no authority knows.
func selfSigned() tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
