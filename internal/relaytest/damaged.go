package relaytest

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A DamagedPool fails each query of deliveries that is asked about one of the words, as if their
// rows were on a damaged page. Failed counts these queries.
type DamagedPool struct {
	*pgxpool.Pool
	Words  []string
	Failed atomic.Int64
}

// Query is that of the pool, or fails.
func (p *DamagedPool) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if !strings.Contains(sql, "outbox_delivery") {
		return p.Pool.Query(ctx, sql, args...)
	}
	for _, arg := range args {
		list, _ := arg.([]string)
		if slices.ContainsFunc(list, func(s string) bool { return slices.Contains(p.Words, s) }) {
			p.Failed.Add(1)
			return nil, &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "XX001", Message: "invalid page"}
		}
	}
	return p.Pool.Query(ctx, sql, args...)
}
