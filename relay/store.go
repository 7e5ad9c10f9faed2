package relay

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// store runs the engine's statements. It is safe for concurrent use.
type store struct {
	pool   pg.Pool
	direct *pgxpool.Pool // behind pool
}

const selectSalt = `SELECT salt::text FROM outbox_watch`

// salt returns what makes digests comparable in this database alone.
func (s *store) salt(ctx context.Context) (salt string, err error) {
	return pg.Value[string](ctx, s.pool, "read salt", selectSalt)
}

// A destination that refused the relay refused what the relay sent with its former settings.
// Without traffic, nothing but their change says that this may be over.
const recordDigests = `
UPDATE outbox_relay_destination d SET settings = x.settings, secrets = x.secrets, refused_at = NULL, refused_error = NULL
FROM unnest($2::text[], $3::text[], $4::text[]) AS x (destination, settings, secrets)
WHERE d.relay_id = $1 AND d.destination = x.destination AND (d.settings, d.secrets) IS DISTINCT FROM (x.settings, x.secrets)`

// digests are those of the settings of a relay's destinations.
type digests struct{ names, settings, secrets []string }

func newDigests(destinations []post.Destination, salt string) (all digests) {
	for _, d := range destinations {
		settings, secrets := d.Digests(salt)
		all.names, all.settings, all.secrets = append(all.names, d.Name), append(all.settings, settings), append(all.secrets, secrets)
	}
	return all
}

// recordDigests records the digests of a relay, so that relays that differ are found.
func (s *store) recordDigests(ctx context.Context, relayID int32, d digests) error {
	return pg.Exec(ctx, s.pool, "record digests", recordDigests, relayID, d.names, d.settings, d.secrets)
}

const recordReload = `
UPDATE outbox_relay SET reload_error = nullif($2, ''), reload_failed_at = CASE WHEN $2 <> '' THEN now() END
WHERE id = $1 AND coalesce(reload_error, '') <> $2`

// recordReload records why this relay refused its new configuration; empty: it uses what is
// configured.
func (s *store) recordReload(ctx context.Context, relayID int32, refused string) error {
	return pg.Exec(ctx, s.pool, "record reload", recordReload, relayID, plain.Clip(refused))
}

const recordSlowdown = `
UPDATE outbox_relay_destination SET wait_until = CASE WHEN wait_until = '-infinity' AND NOT $5::boolean THEN wait_until WHEN $3::float8 > 0 THEN now() + make_interval(secs => $3::float8) END, slowed_to = nullif($4::float8, 0)
WHERE destination = $1 AND relay_id = $2`

// recordSlowdown records for how long a destination asks a relay to wait, and to how many requests
// a second it has slowed it; 0: it has not.
func (s *store) recordSlowdown(ctx context.Context, destination string, relayID int32, wait time.Duration, perSecond float64, first bool) error {
	return pg.Exec(ctx, s.pool, "record slowdown", recordSlowdown, destination, relayID, wait.Seconds(), perSecond, first)
}
