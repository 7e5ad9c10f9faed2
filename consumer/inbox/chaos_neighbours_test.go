package inbox_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

// In the chaos an inbox has neighbours that get the same events from the same sender, each in every process of the cast: a
// receiver of another name beside it, and one of its own name in another schema. And the inbox serves several tenants, so
// that some of its handlers leave a search_path behind in which there are tables of the same names.
const neighboursSchema = `
CREATE TABLE effect_beside (key text NOT NULL);
CREATE SCHEMA apart;
CREATE TABLE apart.effect_apart (key text NOT NULL);
CREATE TABLE apart.processed_events (LIKE processed_events INCLUDING ALL);
CREATE TABLE apart.inbox_forgotten (LIKE inbox_forgotten INCLUDING ALL);
CREATE FUNCTION apart.inbox_reset() RETURNS boolean LANGUAGE sql AS 'SELECT public.inbox_reset()';
CREATE SCHEMA tenant;
CREATE TABLE tenant.processed_events (LIKE processed_events INCLUDING ALL);
CREATE TABLE tenant.inbox_events (LIKE inbox_events INCLUDING ALL);
CREATE TABLE tenant.inbox_forgotten (LIKE inbox_forgotten INCLUDING ALL)`

// neighbours are where they listen, and the tables of their effects.
var neighbours = map[string]string{"/beside": "effect_beside", "/apart": "apart.effect_apart"}

// neighbourEvery is how many events pass for one that is brought to the neighbours, too.
const neighbourEvery = 4

// serveNeighbours adds them to what a process serves.
func serveNeighbours(mux *http.ServeMux, p *receivertest.Player) {
	quiet := slog.New(slog.DiscardHandler)
	for path, table := range neighbours {
		cfg, dsn := consumer.Config{Receiver: "beside", Secrets: []string{receivertest.SecretText}, Logger: quiet}, p.DSN
		if path == "/apart" {
			cfg.Receiver, dsn = "test", receivertest.WithSetting(p.DSN, "search_path", "apart")
		}
		pool, err := pgxpool.New(context.Background(), dsn)
		if err != nil {
			panic(err)
		}
		receive := receivertest.Must(consumer.Middleware(pool, cfg))
		mux.Handle(path, receive(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, err := consumer.Tx(r.Context()).Exec(r.Context(), "INSERT INTO "+table+" VALUES ($1)", consumer.EventFrom(r.Context()).Key)
			if err != nil {
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			w.WriteHeader(http.StatusNoContent)
		})))
	}
}

// leaveTenantBehind is what multi-tenant code does.
func leaveTenantBehind(ctx context.Context) error {
	if _, err := consumer.Tx(ctx).Exec(ctx, "SELECT set_config('search_path', 'tenant, public', false)"); err != nil {
		return fmt.Errorf("set search_path: %w", err)
	}
	return nil
}

// wantNeighbours wants one effect for each event that a neighbour acknowledged, and nothing in the tenant's tables.
func (s *chaosStage) wantNeighbours(l *chaosLoad) {
	s.t.Helper()
	for path, table := range neighbours {
		brought := 0
		for _, e := range l.events {
			if e.beside[path] {
				brought++
			}
		}
		var effects, events int
		pgtest.Must(s.t, s.pool.QueryRow(s.t.Context(), "SELECT count(*), count(DISTINCT key) FROM "+table).Scan(&effects, &events))
		if brought == 0 || effects != brought || events != brought {
			s.t.Errorf("%s acknowledged %d events and has %d effects of %d events", path, brought, effects, events)
		}
		s.t.Logf("%s: %d events, %d effects", path, brought, effects)
	}
	var strays int
	if err := s.pool.QueryRow(s.t.Context(), `SELECT (SELECT count(*) FROM tenant.processed_events) + (SELECT count(*) FROM tenant.inbox_events)`).Scan(&strays); err != nil || strays > 0 {
		s.t.Errorf("%d rows are in the tenant's tables, %v", strays, err)
	}
}
