package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	guarded "github.com/outbox-relay/outbox-relay/internal/process"
)

// ours is outbox-relay: the program itself, with its own migrations.
type ours struct{}

const (
	insertRoutes = `
INSERT INTO outbox_route (pattern, destination) SELECT 't' || i || '.*', 'd' || i FROM generate_series(0, $1 - 1) i`

	fillOutbox = `
INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
SELECT 't' || i % $3 || '.made', ` + payloadSQL + `, $6 || i, 'key-' || i % nullif($5, 0)
FROM generate_series($1::int, $2::int) i`

	insertOutbox = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t0.made', $1, $2)`

	// Of events that have arrived: relays have taken them.
	unsettledOutbox = `
SELECT EXISTS (SELECT FROM outbox_delivery WHERE status = 'pending') OR EXISTS (SELECT FROM outbox_range WHERE ended_at IS NULL)`

	// Settled events as relays leave them, with the xid of those that no relay takes. Loading them
	// past the triggers takes a tenth of the time of delivering them.
	settledOutbox = `
WITH event AS (
    INSERT INTO outbox (event_type, payload, idempotency_key, xid)
    SELECT 't0.made', ('{"pad":"' || repeat('x', 280) || '"}')::json, 'settled-' || i, '2' FROM generate_series($1::int, $2::int) i RETURNING id
)
INSERT INTO outbox_delivery (event_id, destination, status, delivered_at, last_attempt_at, attempts, claim, last_http_status)
SELECT id, 'd0', 'delivered', now(), now(), 1, 1, 200 FROM event`
)

func (ours) unsettled() string { return unsettledOutbox }

func (ours) prepare(ctx context.Context, r *rig, db *database, l load) error {
	migrate := guarded.Command{Argv: []string{r.options.relay, "migrate", "up"}, Env: []string{"OUTBOX_DATABASE_URL=" + db.dsn}}
	if err := guarded.Run(ctx, migrate); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	if err := db.exec(ctx, insertRoutes, l.destinations+2); err != nil { // a dead and a slow one more
		return err
	}
	const batch = 500_000
	for first := 0; first < l.settled; first += batch {
		last := min(first+batch, l.settled) - 1
		err := db.inTransaction(ctx, `SET LOCAL session_replication_role = replica`, settledOutbox, first, last)
		if err != nil {
			return err
		}
	}
	return nil
}

func (ours) fill(ctx context.Context, db *database, l load, first, count int) error {
	err := db.exec(ctx, fillOutbox, first, first+count-1, l.destinations, padding(l.payload), l.keys, "k-"+db.generation)
	if err != nil {
		return err
	}
	// Events without a number that is waited for, for the destinations behind the others.
	for i, due := range []int{l.dead, l.slow} {
		if due == 0 {
			continue
		}
		aside := fmt.Sprintf(`INSERT INTO outbox (event_type, payload, idempotency_key)
			SELECT 't%d.made', '{}', 'aside-%d-' || i FROM generate_series(1, $1::int) i`, l.destinations+i, i)
		if err := db.exec(ctx, aside, due); err != nil {
			return err
		}
	}
	return nil
}

func (ours) producer(pool *pgxpool.Pool, l load) (func(ctx context.Context, n int) error, error) {
	return insertBy(insertOutbox, pool, l), nil
}

func (ours) start(ctx context.Context, r *rig, db *database, l load) (all []*process, err error) {
	config, err := r.relayConfig(l)
	if err != nil {
		return nil, err
	}
	dsn := db.dsn
	if l.distance > 0 {
		if dsn, err = r.distantDSN(ctx, db, l.distance); err != nil {
			return nil, err
		}
	}
	for i := range l.relays {
		env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_RELAY_NAME=relay-" + strconv.Itoa(i)}
		p, err := startRelay(env, r.options.relay, "run", "--config", config)
		if err != nil {
			return nil, errors.Join(err, stopAll(all))
		}
		all = append(all, p)
	}
	return all, nil
}

// relayConfig writes the configuration of the relays and returns its path.
func (r *rig) relayConfig(l load) (string, error) {
	var text strings.Builder
	fmt.Fprintf(&text, "relay: {max_in_flight: %d}\ndefaults: {max_in_flight: %d", l.inFlight, l.inFlight)
	if l.wire != "" {
		authority := filepath.Join(r.dir, "authority.pem")
		if err := os.WriteFile(authority, []byte(r.addresses.Authority), 0o600); err != nil {
			return "", fmt.Errorf("write authority: %w", err)
		}
		fmt.Fprintf(&text, ", tls: {ca_file: %q}", authority)
	}
	text.WriteString("}\nlog: {level: error}\nmetrics: {listen: \"127.0.0.1:0\"}\ndestinations:\n")
	var urls []string
	for i := range l.destinations {
		urls = append(urls, r.url(l.wire, l.delay)+destinationName(i))
	}
	if l.dead > 0 || l.slow > 0 {
		urls = append(urls, "http://127.0.0.1:1/dead", r.url("", slowAnswer)+"slow")
	}
	for i, url := range urls {
		fmt.Fprintf(&text, "  %s: {url: %q, signing_secrets: [%q]}\n", destinationName(i), url, benchSecret)
	}
	text.WriteString("routes:\n")
	for i := range urls {
		fmt.Fprintf(&text, "  - {event: \"t%d.*\", to: [%s]}\n", i, destinationName(i))
	}
	path := filepath.Join(r.dir, "outbox-relay.yaml")
	return path, os.WriteFile(path, []byte(text.String()), 0o600)
}
