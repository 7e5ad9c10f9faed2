package relay

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// Who may create objects in the schema can run code with the rights of the relay: its log says who, and what to revoke.
func TestSecurityRelayWarnsOfAnOpenSchema(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`GRANT CREATE ON SCHEMA public TO PUBLIC, pg_read_all_data`)
	found, err := pg.FindSchemaCreators(t.Context(), db.pool)
	must(t, err)
	revoke := `REVOKE CREATE ON SCHEMA public FROM PUBLIC, pg_read_all_data; GRANT CREATE ON SCHEMA public TO ` + found.Owner
	if fmt.Sprint(found.Roles) != "[PUBLIC pg_read_all_data]" || found.Revoke() != revoke {
		t.Errorf("found %+v, revoke with %q", found, found.Revoke())
	}
	var log bytes.Buffer
	cfg := db.config(to("http://receiver.test/"))
	cfg.Log = zerolog.New(zerolog.SyncWriter(&log))
	r := start(t, cfg)
	r.instance()
	r.stop()
	if want := `"roles":["PUBLIC","pg_read_all_data"],"run":"` + revoke + `"`; strings.Count(log.String(), want) != 1 {
		t.Errorf("the log does not say %s once:\n%s", want, log.String())
	}

	db.exec(revoke)
	if found, err := pg.FindSchemaCreators(t.Context(), db.pool); err != nil || len(found.Roles) != 0 || found.Revoke() != "" {
		t.Errorf("then found %+v, %v", found, err)
	}
}
