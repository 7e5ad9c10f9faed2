package relay

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// store runs the engine's statements. It is safe for concurrent use.
type store struct {
	pool   pg.Pool
	direct *pgxpool.Pool // behind pool
}
