package kafkapost_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"go.uber.org/goleak"

	"github.com/outbox-relay/outbox-relay/internal/localkafka"
	"github.com/outbox-relay/outbox-relay/internal/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

const topic = localkafka.Topic

func TestMain(m *testing.M) {
	if localkafka.Serve() {
		return
	}
	goleak.VerifyTestMain(m)
}

func config(address string) kafkapost.Config {
	return kafkapost.Config{
		Settings: kafkapost.Settings{Topic: topic}, Destination: "lake", Brokers: []string{address}, Timeout: 3 * time.Second, Agent: "test",
		Dial: (&net.Dialer{}).DialContext,
	}
}

// login makes a client prove itself by a password.
func login(mechanism kafkapost.Mechanism, pass string) func(*kafkapost.Config) {
	return func(c *kafkapost.Config) {
		c.Mechanism = mechanism
		c.Authorization = func() string { return "Basic " + base64.StdEncoding.EncodeToString([]byte("relay:"+pass)) }
	}
}

func publish(t *testing.T, c *kafkapost.Client, topic string, m kafkapost.Message) policy.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	return c.Publish(ctx, topic, m)
}

// Each row of the table in docs/kafka.md.
func TestWhatErrorsMean(t *testing.T) {
	t.Parallel()
	var running sync.WaitGroup // all at once: some take their whole timeout
	defer running.Wait()
	for name, c := range map[string]struct {
		mode      string
		change    func(*kafkapost.Config)
		topic     string
		payload   int
		want      policy.Reason
		unreached bool
		unsent    bool
		text      string
	}{
		"delivered":                  {want: policy.ReasonOK},
		"a change of leader":         {mode: "hiccup", want: policy.ReasonOK},
		"applied, and then refused":  {mode: "applied", want: policy.ReasonOK},
		"no such topic":              {topic: "none", want: policy.ReasonNotFound, text: `there is no topic "none"`},
		"no right to write":          {mode: "no rights", want: policy.ReasonUnauthorized, text: "allow the user to write"},
		"refused by a policy":        {mode: "policy", want: policy.ReasonRejected, text: "policy of topic"},
		"too large for the topic":    {mode: "small", payload: 5000, want: policy.ReasonTooLarge, text: "max.message.bytes", unsent: true},
		"too few replicas":           {mode: "replicas", want: policy.ReasonUnavailable, text: "too few replicas"},
		"refused in turns":           {mode: "out of time", want: policy.ReasonUnavailable, text: "none of 5 tries"},
		"a broken disk":              {mode: "storage", want: policy.ReasonUnavailable},
		"no answer":                  {mode: "silent", want: policy.ReasonTimeout, text: "may have stored"},
		"nothing listens":            {change: func(c *kafkapost.Config) { c.Brokers = []string{"127.0.0.1:1"} }, want: policy.ReasonConnect, unreached: true},
		"no such host":               {change: func(c *kafkapost.Config) { c.Brokers = []string{"kafka.invalid:9092"} }, want: policy.ReasonDNS, unreached: true},
		"a wrong password (plain)":   {mode: "refuses", change: login(kafkapost.Plain, "wrong"), want: policy.ReasonUnauthorized, unreached: true, text: "refuse the relay's user"},
		"a wrong password (scram)":   {mode: "refuses", change: login(kafkapost.ScramSHA256, "wrong"), want: policy.ReasonUnauthorized, unreached: true, text: "refuse the relay's user"},
		"closed while logging in":    {mode: "sasl", change: login(kafkapost.ScramSHA256, "wrong"), want: policy.ReasonNetwork, unreached: true, text: "while the relay logged in"},
		"the right password (scram)": {mode: "sasl", change: login(kafkapost.ScramSHA256, "right"), want: policy.ReasonOK},
		"the right password (plain)": {mode: "sasl", change: login(kafkapost.Plain, "right"), want: policy.ReasonOK},
		"an unknown authority":       {mode: "tls", change: func(c *kafkapost.Config) { c.TLS = func() *tls.Config { return &tls.Config{} } }, want: policy.ReasonTLS, unreached: true, text: "tls.ca_file"},
		"TLS where there is none":    {change: func(c *kafkapost.Config) { c.TLS = func() *tls.Config { return &tls.Config{} } }, want: policy.ReasonTimeout, unreached: true},
		"no TLS where there is one":  {mode: "tls", want: policy.ReasonNetwork, unreached: true},
	} {
		address, _ := localkafka.Start(t, c.mode)
		cfg := config(address)
		if (!c.unreached || c.want == policy.ReasonTLS) && c.want != policy.ReasonTimeout {
			cfg.Timeout = relaytest.Patience // is not waited for
		}
		if c.change != nil {
			c.change(&cfg)
		}
		client := kafkapost.New(cfg)
		t.Cleanup(client.CloseIdleConnections)
		running.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), cfg.Timeout)
			defer cancel()
			got := client.Publish(ctx, cmp.Or(c.topic, topic), kafkapost.Message{IdempotencyKey: "k", Payload: []byte(strings.Repeat("x", c.payload))})
			if got.Reason != c.want || got.Unreached != c.unreached || got.Posted == c.unsent || !strings.Contains(got.Message, c.text) {
				t.Errorf("%s: result is %+v", name, got)
			}
		})
	}
}

// Each record has the headers of the wire contract and its key, and all of one ordering key are in
// one partition, in order.
func TestRecords(t *testing.T) {
	t.Parallel()
	address, _ := localkafka.Start(t, "")
	client := kafkapost.New(config(address))
	t.Cleanup(client.CloseIdleConnections)
	const keys, events = 8, 25
	var sending sync.WaitGroup
	for k := range keys {
		sending.Go(func() {
			for i := range events {
				got := client.Publish(t.Context(), topic, kafkapost.Message{
					OrderingKey: fmt.Sprint("key", k), IdempotencyKey: fmt.Sprint(k, "-", i), Payload: []byte(fmt.Sprint(i)),
					Header: []kafkapost.Header{{Name: "X-Idempotency-Key", Value: fmt.Sprint(k, "-", i)}},
				})
				if got.Reason != policy.ReasonOK {
					t.Errorf("result is %+v", got)
				}
			}
		})
	}
	sending.Wait()
	reader, err := kgo.NewClient(kgo.SeedBrokers(address), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	relaytest.Must(t, err)
	defer reader.Close()
	partitions, seen := map[string][]int32{}, map[string]int{}
	for n := 0; n < keys*events; {
		fetched := reader.PollFetches(t.Context())
		relaytest.Must(t, fetched.Err())
		fetched.EachRecord(func(r *kgo.Record) {
			n++
			key := string(r.Key)
			if !slices.Contains(partitions[key], r.Partition) {
				partitions[key] = append(partitions[key], r.Partition)
			}
			if string(r.Value) != fmt.Sprint(seen[key]) || len(r.Headers) != 1 || r.Headers[0].Key != "X-Idempotency-Key" {
				t.Errorf("%s is %q with %v, want %d", key, r.Value, r.Headers, seen[key])
			}
			seen[key]++
		})
	}
	for key, in := range partitions {
		if len(in) != 1 {
			t.Errorf("%s is in partitions %v", key, in)
		}
	}
}

// Nothing is left of a client that is let go right after an answer; TestMain looks for it.
func TestClientIsLetGoRightAfterAnAnswer(t *testing.T) {
	t.Parallel()
	address, _ := localkafka.Start(t, "")
	for range 300 {
		client := kafkapost.New(config(address))
		if got := client.Publish(t.Context(), topic, kafkapost.Message{Payload: []byte("1")}); got.Reason != policy.ReasonOK {
			t.Fatalf("result is %+v", got)
		}
		client.CloseIdleConnections()
	}
}

// A broker that was away costs the attempts of that time, and no later one.
func TestAnOutage(t *testing.T) {
	t.Parallel()
	address, broker := localkafka.Start(t, "")
	client := kafkapost.New(config(address))
	t.Cleanup(client.CloseIdleConnections)
	for _, step := range []struct {
		do   func()
		want []policy.Reason
	}{
		{func() {}, []policy.Reason{policy.ReasonOK}},
		{broker.Kill, []policy.Reason{policy.ReasonConnect, policy.ReasonNetwork}},
		{func() { relaytest.Must(t, broker.Restart(t.Context())) }, []policy.Reason{policy.ReasonOK}},
	} {
		step.do()
		if got := publish(t, client, topic, kafkapost.Message{IdempotencyKey: "k"}); !slices.Contains(step.want, got.Reason) {
			t.Fatalf("result is %+v, want one of %v", got, step.want)
		}
	}
}

// A user who gets the right to write can write, and nothing is left of the producer that the
// brokers had refused; TestMain looks for it.
func TestRightThatIsGivenLater(t *testing.T) {
	t.Parallel()
	address, _ := localkafka.Start(t, "acl")
	cfg := config(address)
	login(kafkapost.Plain, "right")(&cfg)
	client := kafkapost.New(cfg)
	t.Cleanup(client.CloseIdleConnections)
	var refused sync.WaitGroup
	for range 20 {
		refused.Go(func() {
			if got := publish(t, client, topic, kafkapost.Message{IdempotencyKey: "k"}); got.Reason != policy.ReasonUnauthorized {
				t.Errorf("without the right: result is %+v", got)
			}
		})
	}
	refused.Wait()
	localkafka.AllowWriting(t, localkafka.Client(t, address, kgo.SASL(plain.Auth{User: "root", Pass: "r"}.AsMechanism())), topic)
	if got := publish(t, client, topic, kafkapost.Message{IdempotencyKey: "k"}); got.Reason != policy.ReasonOK {
		t.Errorf("with the right: result is %+v", got)
	}
}

// Records that are written together are one message to the broker, and a topic's limit is that of a
// batch. Those that fit must fail neither for the sum of them nor for a large one among them.
func TestALargeRecordFailsAlone(t *testing.T) {
	t.Parallel()
	address, _ := localkafka.Start(t, "small")
	cfg := config(address)
	cfg.Timeout = relaytest.Patience // a hundred at once may take long
	client := kafkapost.New(cfg)
	t.Cleanup(client.CloseIdleConnections)
	var sending sync.WaitGroup
	for i := range 100 {
		sending.Go(func() {
			payload, want := 600, policy.ReasonOK
			if i%20 == 0 {
				payload, want = 5000, policy.ReasonTooLarge
			}
			got := client.Publish(t.Context(), topic, kafkapost.Message{OrderingKey: "k", IdempotencyKey: fmt.Sprint(i), Payload: make([]byte, payload)})
			if got.Reason != want {
				t.Errorf("%d bytes: result is %+v", payload, got)
			}
		})
	}
	sending.Wait()
}

// A record that is larger than the batches of others is sent all the same, as far as the topic
// takes it.
func TestLargestRecordOfADefaultBroker(t *testing.T) {
	t.Parallel()
	address, _ := localkafka.Start(t, "")
	c := kafkapost.New(config(address))
	t.Cleanup(c.CloseIdleConnections)
	for size, want := range map[int]policy.Reason{1_040_000: policy.ReasonOK, 1_060_000: policy.ReasonTooLarge} {
		if v := publish(t, c, topic, kafkapost.Message{IdempotencyKey: "k", Payload: bytes.Repeat([]byte("1"), size)}); v.Reason != want {
			t.Errorf("%d bytes: %+v, want %s", size, v, want)
		}
	}
}

func TestReach(t *testing.T) {
	t.Parallel()
	address, _ := localkafka.Start(t, "")
	owner := localkafka.Client(t, address)
	localkafka.CreateTopic(t, owner, "compacted", "cleanup.policy", "compact,delete")
	localkafka.CreateTopic(t, owner, "small", "max.message.bytes", "3000")
	for name, want := range map[string]struct {
		topic         string
		key           kafkapost.Key
		warning, text string
	}{
		"works":                   {topic: topic},
		"missing":                 {topic: "none", text: `there is no topic "none"`},
		"compacted":               {topic: "compacted", warning: "drops all but the last event of each ordering key"},
		"compacted, and meant":    {topic: "compacted", key: kafkapost.KeyIdempotency},
		"small":                   {topic: "small", warning: "at most 3000 bytes, and an event may have 1048576"},
		"as many as types":        {topic: "outbox.{type}"},
		"none of the destination": {topic: "{destination}", text: `there is no topic "lake"`},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config(address)
			cfg.Topic, cfg.Key, cfg.Largest = want.topic, want.key, 1<<20
			c := kafkapost.New(cfg)
			t.Cleanup(c.CloseIdleConnections)
			warnings, err := c.Reach(t.Context())
			if text := fmt.Sprint(err); (err != nil) != (want.text != "") || !strings.Contains(text, want.text) {
				t.Errorf("Reach says %v, want %q", err, want.text)
			}
			if text := strings.Join(warnings, "; "); (text != "") != (want.warning != "") || !strings.Contains(text, want.warning) {
				t.Errorf("Reach warns of %q, want %q", text, want.warning)
			}
		})
	}
}
