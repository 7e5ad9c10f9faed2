package session

import (
	"maps"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// The settings on which the plans rest win, whatever the DSN says; the DSN's other settings stay.
func TestPoolSettings(t *testing.T) {
	t.Parallel()
	given, err := pgxpool.ParseConfig("postgres://db/x?enable_seqscan=on&work_mem=7MB&pool_max_conns=50&application_name=theirs")
	relaytest.Must(t, err)
	cfg := Config{Pool: given, Schema: `My "Schema`}
	got := cfg.PoolConfig()
	want := pg.SessionSettings()
	want["work_mem"], want["search_path"] = "7MB", `"My ""Schema"`
	if !maps.Equal(got.ConnConfig.RuntimeParams, want) {
		t.Errorf("settings %v, want %v", got.ConnConfig.RuntimeParams, want)
	}
	testkit.Equal(t, "connections", got.MaxConns, defaultConns)
	if given.ConnConfig.RuntimeParams["enable_seqscan"] != "on" || given.MaxConns != 50 {
		t.Error("the caller's configuration was changed")
	}
}
