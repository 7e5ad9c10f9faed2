package kafkapost

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Reach connects, and asks whether the topic exists and the user may write to it, as far as the
// user may ask. It writes nothing. The warnings are what the topic stores, and not as well as it
// could.
func (c *Client) Reach(ctx context.Context) (warnings []string, err error) {
	client, err := c.use(false)
	if err != nil {
		return nil, err
	}
	defer c.unuse(client)
	request := kmsg.NewPtrMetadataRequest()
	request.AllowAutoTopicCreation, request.IncludeTopicAuthorizedOperations = false, true
	request.Topics = []kmsg.MetadataRequestTopic{}
	name := c.cfg.topic("", c.cfg.Destination)
	fixed := !strings.Contains(c.cfg.Topic, typePlace)
	if fixed {
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = kmsg.StringPtr(name)
		request.Topics = append(request.Topics, topic)
	}
	since := time.Now()
	answer, err := request.RequestWith(ctx, client)
	if err != nil {
		return nil, errors.New(c.failed(since, c.cfg.Topic, err).Message)
	}
	for i := range answer.Topics {
		if err := topicRefusal(&answer.Topics[i]); err != nil {
			return nil, errors.New(c.failed(since, name, err).Message)
		}
	}
	if fixed {
		warnings = c.doubts(ctx, client.Client, name)
	}
	return warnings, nil
}

// topicRefusal returns the error that a record to a topic would be answered with; nil: none is
// known.
func topicRefusal(topic *kmsg.MetadataResponseTopic) error {
	const unknown = -1 << 31 // brokers before 2.3, or an answer without rights
	if err := kerr.ErrorForCode(topic.ErrorCode); err != nil {
		return err
	}
	if rights := topic.AuthorizedOperations; rights != unknown && rights&(1<<kmsg.ACLOperationWrite) == 0 {
		return kerr.TopicAuthorizationFailed
	}
	return nil
}

// doubts returns what makes a topic that can store the events lose some of them. A user who may not
// ask for the topic's settings gets none.
func (c *Client) doubts(ctx context.Context, client *kgo.Client, topic string) (texts []string) {
	request := kmsg.NewPtrDescribeConfigsRequest()
	resource := kmsg.NewDescribeConfigsRequestResource()
	resource.ResourceType, resource.ResourceName = kmsg.ConfigResourceTypeTopic, topic
	resource.ConfigNames = []string{"cleanup.policy", "max.message.bytes"}
	request.Resources = append(request.Resources, resource)
	answer, err := request.RequestWith(ctx, client)
	if err != nil || len(answer.Resources) != 1 {
		return nil
	}
	for _, setting := range answer.Resources[0].Configs {
		if setting.Value == nil {
			continue
		}
		switch value := *setting.Value; setting.Name {
		case "cleanup.policy":
			if strings.Contains(value, "compact") && c.cfg.Key != KeyIdempotency {
				texts = append(texts, fmt.Sprintf("the topic %q is compacted: it drops all but the last event of each ordering key, and refuses events without one; "+
					"set its cleanup.policy to delete, or kafka.key: idempotency_key", topic))
			}
		case "max.message.bytes":
			if size, err := strconv.ParseInt(value, 10, 64); err == nil && size < c.cfg.Largest {
				texts = append(texts, fmt.Sprintf("the topic %q takes records of at most %d bytes, and an event may have %d: larger ones will fail; raise its max.message.bytes",
					topic, size, c.cfg.Largest))
			}
		}
	}
	return texts
}
