package dynamostore_test

import (
	"crypto/rand"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb/types"

	"github.com/outbox-relay/outbox-relay/consumer/dynamostore"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/consumer/storetest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Subject{
		SurvivesRestart: true,
		New: func(t testing.TB) storetest.Memory {
			s, table := servers.Shared(t)
			return memory(t, s, table)
		},
		NewServer: func(t testing.TB) storetest.Memory { return memory(t, servers.Alone(t), "processed_events") },
	})
}

func claim(key string) store.Claim {
	return store.Claim{Receiver: "a b", Source: "fin ance:", IdempotencyKey: key, Token: rand.Text()}
}

// attributes reads an item as DynamoDB has it.
func attributes(t *testing.T, c *dynamodb.Client, table, event string) map[string]types.AttributeValue {
	t.Helper()
	out, err := c.GetItem(t.Context(), &dynamodb.GetItemInput{
		TableName: &table, ConsistentRead: aws.Bool(true),
		Key: map[string]types.AttributeValue{"event": &types.AttributeValueMemberS{Value: event}},
	})
	testkit.Must(t, err)
	return out.Item
}

// What DynamoDB is told to remove must be over by then, and not much earlier.
func TestNameAndTimesToLive(t *testing.T) {
	t.Parallel()
	s, table := servers.Shared(t)
	create(t, s, table)
	c := client(t, s)
	kept, ctx := dynamostore.New(c, table), t.Context()
	want := func(what string, earliest, latest time.Time) {
		t.Helper()
		item := attributes(t, c, table, "a+b:fin+ance%3A:a:{b}")
		until := number(t, item["until"])
		expires := number(t, item["expires_at"])
		if until < earliest.UnixMilli() || until > latest.UnixMilli() || expires*1000 < until || expires*1000 > until+1000 {
			t.Errorf("%s: until %d, expires at %d; want between %v and %v", what, until, expires, earliest, latest)
		}
	}
	one, asked := claim("a:{b}"), time.Now()
	if got, err := kept.Acquire(ctx, one, time.Hour); err != nil || !got.Claimed {
		t.Fatalf("%+v, %v", got, err)
	}
	want("claimed", asked.Add(time.Hour), time.Now().Add(time.Hour))
	const ttl = 7 * 24 * time.Hour
	asked = time.Now()
	testkit.Must(t, kept.Complete(ctx, one, store.Known{Status: 200, Hash: "h"}, ttl))
	answered := time.Now()
	want("completed", asked.Add(ttl), answered.Add(ttl))
	if got, err := kept.Acquire(ctx, claim("a:{b}"), time.Hour); err != nil || got.Known == nil {
		t.Fatalf("%+v, %v", got, err)
	}
	want("asked for again", asked.Add(ttl), answered.Add(ttl))
}

func number(t *testing.T, v types.AttributeValue) int64 {
	t.Helper()
	text, ok := v.(*types.AttributeValueMemberN)
	if !ok {
		t.Fatalf("%T is not a number", v)
	}
	n, err := strconv.ParseInt(text.Value, 10, 64)
	testkit.Must(t, err)
	return n
}

// What is not this package's must not be taken for an event, new or known.
func TestItemsOfOthers(t *testing.T) {
	t.Parallel()
	s, table := servers.Shared(t)
	create(t, s, table)
	c := client(t, s)
	kept, ctx := dynamostore.New(c, table), t.Context()
	future := &types.AttributeValueMemberN{Value: strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10)}
	for name, odd := range map[string]types.AttributeValue{
		"a number":   &types.AttributeValueMemberN{Value: "200"},
		"a sentence": &types.AttributeValueMemberS{Value: "x"},
	} {
		item := map[string]types.AttributeValue{
			"event": &types.AttributeValueMemberS{Value: "a+b:fin+ance%3A:" + name},
			"token": &types.AttributeValueMemberS{Value: "t"},
			"until": future,
			"known": odd,
		}
		if _, err := c.PutItem(ctx, &dynamodb.PutItemInput{TableName: &table, Item: item}); err != nil {
			t.Fatal(err)
		}
		if got, err := kept.Acquire(ctx, claim(name), time.Hour); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestCreateTable(t *testing.T) {
	t.Parallel()
	s, table := servers.Shared(t)
	c := client(t, s)
	for range 2 { // the second time it is there
		testkit.Must(t, dynamostore.CreateTable(t.Context(), c, table))
	}
	if got, err := dynamostore.New(c, table).Acquire(t.Context(), claim("k"), time.Hour); err != nil || !got.Claimed {
		t.Errorf("%+v, %v", got, err)
	}
	other := table + "other"
	if _, err := c.CreateTable(t.Context(), &dynamodb.CreateTableInput{
		TableName:            &other,
		BillingMode:          types.BillingModePayPerRequest,
		AttributeDefinitions: []types.AttributeDefinition{{AttributeName: aws.String("id"), AttributeType: types.ScalarAttributeTypeS}},
		KeySchema:            []types.KeySchemaElement{{AttributeName: aws.String("id"), KeyType: types.KeyTypeHash}},
	}); err != nil {
		t.Fatal(err)
	}
	testkit.ErrorContains(t, "a table with another key", dynamostore.CreateTable(t.Context(), c, other), "use another table")
	if _, err := dynamostore.New(c, table+"none").Acquire(t.Context(), claim("k"), time.Hour); err == nil {
		t.Error("an event was claimed in a table that does not exist")
	}
}

func TestNewNeedsClientAndTable(t *testing.T) {
	t.Parallel()
	for _, c := range []*dynamodb.Client{nil, dynamodb.New(dynamodb.Options{})} {
		func() {
			defer func() {
				if message, _ := recover().(string); !strings.Contains(message, "needs a client and the name of a table") {
					t.Errorf("panic %q", message)
				}
			}()
			dynamostore.New(c, "")
		}()
	}
}
