package consumer_test

import (
	"net/http"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// newLeavingEnv is newEnv with a handler that leaves its connection as the statement of its key does. Requests that come one
// after the other mostly get the same one.
func newLeavingEnv(t *testing.T, f flavour, leave map[string]string) *env {
	t.Helper()
	e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			mustNot(e, e.exec(r.Context(), "INSERT INTO public.met SELECT $1, current_user, current_setting('search_path')", consumer.EventFrom(r.Context()).Key))
			if statement := leave[consumer.EventFrom(r.Context()).Key]; statement != "" {
				mustNot(e, e.exec(r.Context(), statement))
			}
			mustNot(e, e.exec(r.Context(), "INSERT INTO public.effect VALUES ($1)", consumer.EventFrom(r.Context()).Key))
			status := http.StatusNoContent
			if r.Header.Get("Test-Refuse") != "" {
				status = http.StatusTeapot
			}
			w.WriteHeader(status)
		}
	})
	e.mustExec(`CREATE TABLE met (key text, role text, path text)`)
	return e
}

// Multi-tenant code sets search_path for the session. Where the tenant's schema has a table of that name, too, the next event
// would be remembered there, and its duplicate would take effect again.
func TestSearchPathOfATenantReachesNoOtherEvent(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		tenant := "SELECT set_config('search_path', 'tenant, public', false)"
		e := newLeavingEnv(t, f, map[string]string{"a": tenant, "b": tenant, "local": "SET LOCAL search_path = tenant, public"})
		e.mustExec(`CREATE SCHEMA tenant; CREATE TABLE tenant.processed_events (LIKE public.processed_events INCLUDING ALL)`)
		for range 2 {
			for _, key := range []string{"a", "plain", "b", "local", "plain too"} {
				if got := e.post(key, "{}"); got.status != http.StatusNoContent {
					t.Errorf("%s: %d %s", key, got.status, got.body)
				}
				e.wantRows(key, 1, 1)
			}
		}
		if n := e.count("SELECT count(*) FROM tenant.processed_events"); n != 0 {
			t.Errorf("%d events are remembered in the tenant's schema", n)
		}
		if n := e.count("SELECT count(DISTINCT path) FROM met"); n != 1 {
			t.Errorf("handlers met %d search paths, want 1", n)
		}
	})
}

// A handler cannot remove its event's row, nor make it another event's, in whatever way and whether or not it minds the error:
// every duplicate would take effect again. What is personal in the row it may remove.
func TestEventKeepsItsRow(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		statements := map[string]string{
			"function": "SELECT erase('function')",
			"table":    "TRUNCATE processed_events",
			"key":      "UPDATE processed_events SET idempotency_key = 'another' WHERE idempotency_key = 'key'",
			"receiver": "UPDATE processed_events SET receiver = 'another' WHERE idempotency_key = 'receiver'",
			"personal": "UPDATE processed_events SET related_reference = NULL, event_type = 'unknown' WHERE idempotency_key = 'personal'",
		}
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				key := consumer.EventFrom(r.Context()).Key
				mustNot(e, e.exec(r.Context(), "INSERT INTO effect VALUES ($1)", key))
				if err := e.exec(r.Context(), statements[key]); (err == nil) != (key == "personal") {
					t.Errorf("%s: %v", key, err)
				}
				w.WriteHeader(http.StatusNoContent)
			}
		})
		e.mustExec(`CREATE FUNCTION erase(key text) RETURNS void LANGUAGE sql AS 'DELETE FROM processed_events WHERE idempotency_key = key'`)
		for key := range statements {
			for range 2 {
				if got := e.post(key, "{}"); key == "personal" && got.status != http.StatusNoContent || key != "personal" && got.status != http.StatusInternalServerError {
					t.Errorf("%s: %d %s", key, got.status, got.body)
				}
			}
			if want := map[bool]int{true: 1}[key == "personal"]; e.count("SELECT count(*) FROM effect WHERE key = $1", key) != want {
				t.Errorf("%s took effect", key)
			}
		}
		e.mustExec("DELETE FROM processed_events; TRUNCATE processed_events") // in another transaction than the event's
	})
}

// A role and session locks that a handler leaves behind reach no other event, whether its work is committed or not.
func TestRolesAndLocksReachNoOtherEvent(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newLeavingEnv(t, f, map[string]string{
			"role": "SET ROLE pg_read_all_data", "lock": "SELECT pg_advisory_lock(4711)",
		})
		e.mustExec(`GRANT ALL ON ALL TABLES IN SCHEMA public TO pg_read_all_data`) // a role that every server has
		for _, key := range []string{"role", "lock"} {
			wantTeapot := e.newRequest(key, "{}", with("Test-Refuse", "yes"))
			if got := e.do(wantTeapot); got.status != http.StatusTeapot {
				t.Errorf("%s: %d %s", key, got.status, got.body)
			}
			if got := e.post(key, "{}"); got.status != http.StatusNoContent {
				t.Errorf("%s: %d %s", key, got.status, got.body)
			}
			if got := e.post("after "+key, "{}"); got.status != http.StatusNoContent {
				t.Errorf("after %s: %d %s", key, got.status, got.body)
			}
			if n := e.count("SELECT count(*) FROM (" + advisoryLocks + " AND objid = 4711) held"); n != 0 {
				t.Errorf("after %s: %d locks are held", key, n)
			}
		}
		if n := e.count("SELECT count(DISTINCT role) FROM met"); n != 1 {
			t.Errorf("handlers met %d roles, want 1", n)
		}
	})
}
