package memory_test

import (
	"net/http"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

// A function in a schema of the search_path that suits the arguments better than a polymorphic one of pg_catalog is not called with
// the rights of the receiver.
func TestSecurityReceiverCallsNoStrangersFunction(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		e.MustExec(`CREATE FUNCTION format(text, name, name) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hijacked'; END $$`)
		receivertest.WantFirst(t, e.Post("first", "{}"), http.StatusCreated, `{"done":"first"}`)
	})
}
