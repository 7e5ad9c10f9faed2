package handlerctx_test

import (
	"context"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
)

func TestTheInnermostScopeCounts(t *testing.T) {
	t.Parallel()
	if scope := handlerctx.From(t.Context()); scope.Tx != nil || scope.SQLTx != nil || scope.Store || scope.Event.IdempotencyKey != "" {
		t.Errorf("a scope from nowhere: %+v", scope)
	}
	outer, inner := &handlerctx.Scope{Store: true}, &handlerctx.Scope{}
	ctx := handlerctx.With(t.Context(), outer)
	type key struct{}
	if handlerctx.From(context.WithValue(ctx, key{}, 1)) != outer || handlerctx.From(handlerctx.With(ctx, inner)) != inner {
		t.Error("another scope is found")
	}
}
