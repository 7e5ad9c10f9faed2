package dynamostore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb/types"
)

// CreateTable makes the table, billed per request, unless there is one of that name, and returns
// when it can be used: usually within a minute, and at the latest when ctx ends. Let time to live
// be enabled on expires_at as well, see the package's documentation: it is a setting of the
// account's operator, and nothing here depends on it but the table's size.
func CreateTable(ctx context.Context, client *dynamodb.Client, table string) error {
	_, err := client.CreateTable(ctx, &dynamodb.CreateTableInput{
		TableName:            &table,
		BillingMode:          types.BillingModePayPerRequest,
		AttributeDefinitions: []types.AttributeDefinition{{AttributeName: aws.String(attrEvent), AttributeType: types.ScalarAttributeTypeS}},
		KeySchema:            []types.KeySchemaElement{{AttributeName: aws.String(attrEvent), KeyType: types.KeyTypeHash}},
	})
	if _, exists := errors.AsType[*types.ResourceInUseException](err); err != nil && !exists {
		return fmt.Errorf("create table %s: %w", table, err)
	}
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		out, err := client.DescribeTable(ctx, &dynamodb.DescribeTableInput{TableName: &table})
		switch {
		case err != nil:
			return fmt.Errorf("wait for table %s: %w", table, err)
		case out.Table.TableStatus == types.TableStatusActive:
			return checkKey(table, out.Table.KeySchema)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for table %s: %w", table, ctx.Err())
		case <-tick.C:
		}
	}
}

// checkKey refuses a table that was made for something else.
func checkKey(table string, key []types.KeySchemaElement) error {
	if len(key) == 1 && aws.ToString(key[0].AttributeName) == attrEvent {
		return nil
	}
	return fmt.Errorf("table %s has another key than the attribute %s: use another table", table, attrEvent)
}
