package relay

import (
	"errors"
	"strings"
	"testing"
)

// During a deploy the schema is newer than the relays that still run, or start once more.
func TestNewerSchemaThatOnlyAdds(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox_schema_version (version_id, is_applied) VALUES (9999, true)`)
	db.insert(1, "key")
	r := start(t, db.config(to(newReceiver(t, nil).URL)))
	r.settles(t, Delivered, 1)
}

// A schema that is reverted under a running relay ends it, with the reason; a table that is away for a moment does not.
func TestRevertedSchemaEndsTheRelay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to("http://receiver.test/"))
	other := start(t, cfg)
	other.instance()
	db.exec(`ALTER TABLE outbox_relay RENAME TO away`)
	other.await(t, "a failed beat", func(o *observer) bool { return o.failures["session"] > 0 })
	db.exec(`ALTER TABLE away RENAME TO outbox_relay`)
	other.instance()
	other.stop()

	r := prepared(t, cfg)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(t.Context()) }()
	r.instance()
	db.exec(`DELETE FROM outbox_schema_version WHERE version_id > 8; ALTER TABLE outbox_relay DROP COLUMN lease`)
	if err := <-ended; !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), "outbox-relay migrate up") {
		t.Errorf("Run: %v", err)
	}
}
