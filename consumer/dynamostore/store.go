package dynamostore

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb/types"

	"github.com/outbox-relay/outbox-relay/consumer/store"
)

// Attributes of an item.
const (
	attrEvent   = "event" // the partition key
	attrToken   = "token"
	attrUntil   = "until"      // Unix milliseconds: when the lease or the memory ends
	attrExpires = "expires_at" // Unix seconds, not earlier: when DynamoDB may remove the item
	attrKnown   = "known"      // distinguishes a processed event from one that is held
)

// Store is a [store.Store] in DynamoDB, made by [New]. It is safe for concurrent use and starts
// nothing.
type Store struct {
	client *dynamodb.Client
	table  string
}

var _ store.Store = (*Store)(nil)

// New returns a store that uses a table as [CreateTable] makes it. It panics when client is nil or
// table is empty.
func New(client *dynamodb.Client, table string) *Store {
	if client == nil || table == "" {
		panic("dynamostore: New needs a client and the name of a table")
	}
	return &Store{client: client, table: table}
}

// eventName is unambiguous because an escaped source holds no colon.
func eventName(c store.Claim) types.AttributeValue {
	return text(url.QueryEscape(c.Receiver) + ":" + url.QueryEscape(c.Source) + ":" + c.IdempotencyKey)
}

// acquireCondition: no claim holds the event, or this claim does already, or the one that did or
// had processed it has had its time. The token alone is not enough: this claim may have completed
// the event meanwhile.
const acquireCondition = "attribute_not_exists(#event) OR #until <= :now OR (#token = :token AND attribute_not_exists(#known))"

// Acquire implements [store.Store].
func (s *Store) Acquire(ctx context.Context, c store.Claim, lease time.Duration) (store.Acquired, error) {
	// Two rounds: what was in the way may have been released before it is read.
	for range 2 {
		now := time.Now()
		item := newItem(c, now.Add(lease))
		_, err := s.client.PutItem(ctx, &dynamodb.PutItemInput{
			TableName:                           &s.table,
			Item:                                item,
			ConditionExpression:                 aws.String(acquireCondition),
			ExpressionAttributeNames:            names(attrEvent, attrUntil, attrToken, attrKnown),
			ExpressionAttributeValues:           map[string]types.AttributeValue{":now": milliseconds(now), ":token": text(c.Token)},
			ReturnValuesOnConditionCheckFailure: types.ReturnValuesOnConditionCheckFailureAllOld,
		})
		if err == nil {
			return store.Acquired{Claimed: true}, nil
		}
		refused, ok := errors.AsType[*types.ConditionalCheckFailedException](err)
		if !ok {
			return store.Acquired{}, fmt.Errorf("put item: %w", err)
		}
		kept := refused.Item
		if kept == nil { // not every implementation returns it
			if kept, err = s.read(ctx, c); err != nil {
				return store.Acquired{}, err
			}
		}
		switch {
		case len(kept) == 0:
			continue
		case kept[attrKnown] == nil:
			return store.Acquired{}, nil
		}
		known, err := readKnown(kept)
		if err != nil {
			return store.Acquired{}, fmt.Errorf("read item: %w", err)
		}
		return store.Acquired{Known: known}, nil
	}
	return store.Acquired{}, nil // released twice in between: busy enough to be called in flight
}

func (s *Store) read(ctx context.Context, c store.Claim) (map[string]types.AttributeValue, error) {
	out, err := s.client.GetItem(ctx, &dynamodb.GetItemInput{
		TableName:      &s.table,
		Key:            map[string]types.AttributeValue{attrEvent: eventName(c)},
		ConsistentRead: aws.Bool(true),
	})
	if err != nil {
		return nil, fmt.Errorf("get item: %w", err)
	}
	return out.Item, nil
}

// completeCondition: the event is this claim's, or free.
const completeCondition = "attribute_not_exists(#event) OR #token = :token OR #until <= :now"

// Complete implements [store.Store].
func (s *Store) Complete(ctx context.Context, c store.Claim, known store.Known, ttl time.Duration) error {
	kept, textErr := known.MarshalText()
	if textErr != nil {
		return textErr
	}
	now := time.Now()
	item := newItem(c, now.Add(ttl))
	item[attrKnown] = text(string(kept))
	_, err := s.client.PutItem(ctx, &dynamodb.PutItemInput{
		TableName:                 &s.table,
		Item:                      item,
		ConditionExpression:       aws.String(completeCondition),
		ExpressionAttributeNames:  names(attrEvent, attrToken, attrUntil),
		ExpressionAttributeValues: map[string]types.AttributeValue{":now": milliseconds(now), ":token": text(c.Token)},
	})
	if _, lost := errors.AsType[*types.ConditionalCheckFailedException](err); lost {
		return store.ErrLeaseLost
	}
	if err != nil {
		return fmt.Errorf("put item: %w", err)
	}
	return nil
}

// releaseCondition: the event is this claim's and not processed.
const releaseCondition = "#token = :token AND attribute_not_exists(#known)"

// Release implements [store.Store].
func (s *Store) Release(ctx context.Context, c store.Claim) error {
	_, err := s.client.DeleteItem(ctx, &dynamodb.DeleteItemInput{
		TableName:                 &s.table,
		Key:                       map[string]types.AttributeValue{attrEvent: eventName(c)},
		ConditionExpression:       aws.String(releaseCondition),
		ExpressionAttributeNames:  names(attrToken, attrKnown),
		ExpressionAttributeValues: map[string]types.AttributeValue{":token": text(c.Token)},
	})
	if _, another := errors.AsType[*types.ConditionalCheckFailedException](err); err != nil && !another {
		return fmt.Errorf("delete item: %w", err)
	}
	return nil
}

// newItem is an event that is held or known until a time. DynamoDB counts in seconds, rounded up
// here: it must not remove what is still known.
func newItem(c store.Claim, until time.Time) map[string]types.AttributeValue {
	return map[string]types.AttributeValue{
		attrEvent:   eventName(c),
		attrToken:   text(c.Token),
		attrUntil:   milliseconds(until),
		attrExpires: &types.AttributeValueMemberN{Value: strconv.FormatInt(until.Unix()+1, 10)},
	}
}

func readKnown(item map[string]types.AttributeValue) (*store.Known, error) {
	kept, ok := item[attrKnown].(*types.AttributeValueMemberS)
	if !ok {
		return nil, fmt.Errorf("the attribute %s is not a string", attrKnown)
	}
	known := &store.Known{}
	return known, known.UnmarshalText([]byte(kept.Value))
}

func text(s string) types.AttributeValue { return &types.AttributeValueMemberS{Value: s} }

func milliseconds(t time.Time) types.AttributeValue {
	return &types.AttributeValueMemberN{Value: strconv.FormatInt(t.UnixMilli(), 10)}
}

// names stands for attributes in expressions, where many of their names are reserved words.
func names(attributes ...string) map[string]string {
	byName := make(map[string]string, len(attributes))
	for _, attribute := range attributes {
		byName["#"+attribute] = attribute
	}
	return byName
}
