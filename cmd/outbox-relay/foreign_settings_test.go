package main

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A database may write times, intervals and numbers in its own way. A relay delivers all the same, and every command reads them.
func TestForeignSettingsOfDatabase(t *testing.T) {
	t.Parallel()
	for _, pooler := range []string{"auto", "transaction"} {
		t.Run(pooler, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.New(t, migrations.Outbox)
			db := open(t, dsn)
			for setting, value := range map[string]string{
				"datestyle": "German, DMY", "timezone": "Asia/Kathmandu", "intervalstyle": "sql_standard", "bytea_output": "escape",
				"extra_float_digits": "-15", "standard_conforming_strings": "off", "default_transaction_isolation": "serializable",
			} {
				execute(t, db, "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET "+setting+" = ''"+value+"''', current_database()); END $$")
			}
			env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + answering(t, 422), "OUTBOX_DATABASE_POOLER=" + pooler}
			if r := command(env, "send", "paid", "--key=k1"); r.code != 0 {
				t.Fatalf("%+v", r)
			}
			s := start(t, env, "--poll-interval=1s")
			awaitUntil(t, "an attempt", func() bool {
				return query[int](t, db, "SELECT count(*) FROM outbox_delivery WHERE status = 'failed'") == 1
			})
			for _, args := range []string{
				"status", "status --json", "explain 1", "explain 1 --json", "events show 1 --json", "events list --since 1h", "events list --json", "relays", "routes list", "identity show",
				"audit --json", "retry 1 --yes", "replay 1 --yes", "discard 1 --yes", "pause default", "resume default", "archive run", "doctor",
			} {
				if r := command(env, strings.Fields(args)...); r.code != 0 && args != "doctor" || strings.Contains(r.stderr, "invalid") || strings.Contains(r.stdout, "+05:45") {
					t.Errorf("%s: %+v", args, r)
				}
			}
			s.signals <- syscall.SIGTERM
			if code := <-s.code; code != 0 || strings.Contains(s.stderr.String(), "invalid PostgreSQL") {
				t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
			}
		})
	}
}

// JSON has times in UTC, whatever the zone of the host.
func TestZoneOfTheHost(t *testing.T) {
	t.Parallel()
	if time.Local != time.UTC {
		t.Error("times that come from the database are printed in the zone of the host")
	}
}
