// Package localkafka runs brokers for tests: an imitation that speaks Kafka's protocol, each in a
// process of its own on the loopback address, which can be killed and started again with what it
// had written.
package localkafka

import (
	"crypto/tls"
	"net"
	"os"
	"os/signal"
	"strconv"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
	"github.com/outbox-relay/outbox-relay/internal/localserver"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Topic is the topic that each broker has, with this many partitions.
const (
	Topic      = "invoices"
	Partitions = 4
)

// Serve makes this process a broker if [Start] has started it, and then returns true once the
// broker has ended. TestMain calls it first.
func Serve() (served bool) {
	if len(os.Args) != 5 || os.Args[1] != "broker" {
		return false
	}
	serve(os.Args[2], os.Args[3], os.Args[4])
	return true
}

// faults of a broker, by the mode that a test asks for.
func faults(mode string) ([]kfake.Fault, []kfake.Opt) {
	produce := func(err *kerr.Error) ([]kfake.Fault, []kfake.Opt) {
		return []kfake.Fault{{Keys: []kmsg.Key{kmsg.Produce}, Topic: Topic, Err: err, Count: -1}}, nil
	}
	switch mode {
	case "no rights":
		return produce(kerr.TopicAuthorizationFailed)
	case "policy":
		return produce(kerr.PolicyViolation)
	case "replicas":
		return produce(kerr.NotEnoughReplicas)
	case "out of time":
		return produce(kerr.RequestTimedOut)
	case "storage":
		return produce(kerr.KafkaStorageError)
	case "hiccup":
		return []kfake.Fault{{Keys: []kmsg.Key{kmsg.Produce}, Topic: Topic, Err: kerr.NotLeaderForPartition, Count: 1}}, nil
	case "applied":
		return []kfake.Fault{{Keys: []kmsg.Key{kmsg.Produce}, Topic: Topic, Err: kerr.NotEnoughReplicasAfterAppend, Count: 1}}, nil
	case "small":
		return nil, []kfake.Opt{kfake.BrokerConfigs(map[string]string{"message.max.bytes": "2000"})}
	case "sasl":
		return nil, []kfake.Opt{kfake.EnableSASL(), kfake.Superuser("SCRAM-SHA-256", "relay", "right"), kfake.Superuser("PLAIN", "relay", "right")}
	case "acl":
		return nil, []kfake.Opt{
			kfake.EnableSASL(), kfake.EnableACLs(), kfake.Superuser("PLAIN", "root", "r"),
			kfake.User("PLAIN", "relay", "right", kfake.ACL{
				Resource: kmsg.ACLResourceTypeTopic, Name: Topic, Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: kmsg.ACLOperationDescribe, Allow: true,
			}),
		}
	case "reading":
		return []kfake.Fault{
			{Keys: []kmsg.Key{kmsg.Fetch}, Topic: Topic, Err: kerr.NotLeaderForPartition, Count: 5},
			{Keys: []kmsg.Key{kmsg.OffsetCommit}, Topic: Topic, Err: kerr.CoordinatorNotAvailable, Count: 5},
			{Keys: []kmsg.Key{kmsg.OffsetFetch}, TopLevel: true, Err: kerr.CoordinatorLoadInProgress, Count: 2},
			{Keys: []kmsg.Key{kmsg.Heartbeat}, TopLevel: true, Err: kerr.RebalanceInProgress, Count: 2},
		}, nil
	case "refuses":
		_, options := faults("sasl")
		return []kfake.Fault{{Keys: []kmsg.Key{kmsg.SASLAuthenticate}, TopLevel: true, Err: kerr.SaslAuthenticationFailed, Count: -1}}, options
	case "tls":
		return nil, []kfake.Opt{kfake.TLS(&tls.Config{Certificates: []tls.Certificate{localcert.Authority{}.Issue(nil)}})}
	}
	return nil, nil
}

// serve is a broker in its own process.
func serve(port, dir, mode string) {
	number, err := strconv.Atoi(port)
	if err != nil {
		panic(err)
	}
	fault, options := faults(mode)
	cluster, err := kfake.NewCluster(append(options, kfake.NumBrokers(1), kfake.Ports(number), kfake.SeedTopics(Partitions, Topic), kfake.DataDir(dir), kfake.SyncWrites())...)
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

// Start runs a broker until the test ends, and returns its address. mode is one of those of faults;
// empty: a broker without any.
func Start(t testing.TB, mode string) (address string, broker *localserver.Server) {
	t.Helper()
	address = FreeAddress(t)
	return address, StartAt(t, address, mode)
}

// StartAt does so at an address.
func StartAt(t testing.TB, address, mode string) (broker *localserver.Server) {
	t.Helper()
	_, port, err := net.SplitHostPort(address)
	testkit.Must(t, err)
	program, err := os.Executable()
	testkit.Must(t, err)
	broker, err = localserver.StartAt(t.Context(), port, func(dir string) []string { return []string{program, "broker", port, dir, mode} })
	testkit.Must(t, err)
	t.Cleanup(func() { testkit.Must(t, broker.Stop()) })
	return broker
}

// FreeAddress returns an address at which nothing listens.
func FreeAddress(t testing.TB) string {
	t.Helper()
	ports, err := localserver.FreePorts(1)
	testkit.Must(t, err)
	return net.JoinHostPort("127.0.0.1", ports[0])
}

// Client returns a client of a broker that is not the relay's.
func Client(t testing.TB, address string, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append(options, kgo.SeedBrokers(address))...)
	testkit.Must(t, err)
	t.Cleanup(c.Close)
	return c
}

// CreateTopic creates a topic with a setting.
func CreateTopic(t testing.TB, c *kgo.Client, name, setting, value string) {
	t.Helper()
	request := kmsg.NewPtrCreateTopicsRequest()
	wanted := kmsg.NewCreateTopicsRequestTopic()
	wanted.Topic, wanted.NumPartitions, wanted.ReplicationFactor = name, Partitions, 1
	own := kmsg.NewCreateTopicsRequestTopicConfig()
	own.Name, own.Value = setting, kmsg.StringPtr(value)
	wanted.Configs = append(wanted.Configs, own)
	request.Topics = append(request.Topics, wanted)
	answer, err := request.RequestWith(t.Context(), c)
	testkit.Must(t, err)
	testkit.Must(t, kerr.ErrorForCode(answer.Topics[0].ErrorCode))
}

// AllowWriting gives the user "relay" the right to write to a topic.
func AllowWriting(t testing.TB, c *kgo.Client, name string) {
	t.Helper()
	request := kmsg.NewPtrCreateACLsRequest()
	right := kmsg.NewCreateACLsRequestCreation()
	right.ResourceType, right.ResourceName, right.ResourcePatternType = kmsg.ACLResourceTypeTopic, name, kmsg.ACLResourcePatternTypeLiteral
	right.Principal, right.Host, right.Operation, right.PermissionType = "User:relay", "*", kmsg.ACLOperationWrite, kmsg.ACLPermissionTypeAllow
	request.Creations = append(request.Creations, right)
	answer, err := request.RequestWith(t.Context(), c)
	testkit.Must(t, err)
	testkit.Must(t, kerr.ErrorForCode(answer.Results[0].ErrorCode))
}
