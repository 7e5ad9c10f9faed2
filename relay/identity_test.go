package relay

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/post"
)

// knows makes an address one that relays have been accepted under, for tests in which the next relay finds nobody alive
// to vouch for it. Some relay must have recorded the database before.
func (db *database) knows(dsn string) {
	db.Helper()
	conn, err := pgx.ParseConfig(dsn)
	must(db, err)
	if db.exec(`UPDATE outbox_identity SET addresses = addresses || $1::text`, databaseAddress(conn)) != 1 {
		db.Fatal("no relay has recorded this database yet")
	}
}

func TestDatabaseAddress(t *testing.T) {
	t.Parallel()
	for dsn, want := range map[string]string{
		"postgres://u:hunter2@db.internal/app":                                      "db.internal:5432/app",
		"postgres://other@DB.Internal.:5432/app?sslmode=disable&application_name=x": "db.internal:5432/app",
		"host=db.internal user=u password=hunter2 dbname=app":                       "db.internal:5432/app",
		"postgres://u@b:6000,a/app?target_session_attrs=read-write":                 "a:5432,b:6000/app",
		"postgres://u@a,b:6000/app?sslmode=prefer":                                  "a:5432,b:6000/app",
		"postgres://u@[::1]:5433/app":                                               "[::1]:5433/app",
		"postgres://u@/app?host=/run/PG&port=5433":                                  "/run/PG:5433/app",
		"postgres://u@db.internal/other":                                            "db.internal:5432/other",
	} {
		conn, err := pgx.ParseConfig(dsn)
		must(t, err)
		if got := databaseAddress(conn); got != want {
			t.Errorf("%s: %s, want %s", dsn, got, want)
		}
	}
}

func TestDifferences(t *testing.T) {
	t.Parallel()
	recorded := Identity{SystemIdentifier: 1, DatabaseOID: 2, Timeline: 3, Environment: "production", Addresses: []string{"a:5432/app", "b:5432/app"}}
	for name, test := range map[string]struct {
		change func(found *Identity)
		want   string
	}{
		"the same":                      {func(*Identity) {}, ""},
		"another spelling of two":       {func(i *Identity) { i.Addresses = []string{"b:5432/app"} }, ""},
		"another timeline":              {func(i *Identity) { i.Timeline = 4 }, ""},
		"an environment that is silent": {func(i *Identity) { i.Environment = "" }, ""},
		"a server that is silent":       {func(i *Identity) { i.SystemIdentifier, i.Timeline = 0, 0 }, ""},
		"another server":                {func(i *Identity) { i.SystemIdentifier = 9 }, "its system identifier is 9, recorded is 1"},
		"another database":              {func(i *Identity) { i.DatabaseOID = 9 }, "its database oid is 9, recorded is 2"},
		"another environment":           {func(i *Identity) { i.Environment = "staging" }, `its environment is "staging", recorded is "production"`},
		"another address": {
			func(i *Identity) { i.Addresses = []string{"c:5432/app"} },
			"its address is c:5432/app, recorded is a:5432/app or b:5432/app",
		},
		"everything": {
			func(i *Identity) { *i = Identity{8, 9, 3, "staging", []string{"c:5432/app"}, nil} },
			`its system identifier is 8, recorded is 1; its database oid is 9, recorded is 2; its environment is "staging", recorded is "production"; ` +
				"its address is c:5432/app, recorded is a:5432/app or b:5432/app",
		},
	} {
		found := recorded
		found.Addresses = []string{"a:5432/app"}
		test.change(&found)
		differences := found.differences(recorded)
		if got := strings.TrimPrefix(reasonOf(differences), "this is not the database that relays were accepted on: "); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
		if got, want := onlyAddress(differences), name == "another address"; got != want {
			t.Errorf("%s: only the address differs: %v", name, got)
		}
	}
}

func TestEnvironmentName(t *testing.T) {
	t.Parallel()
	for name, good := range map[string]bool{
		"": true, "production": true, "eu-1 / blue": true, strings.Repeat("x", 63): true,
		strings.Repeat("x", 64): false, " production": false, "production ": false, "prod\nuction": false, "münchen": false, "a\x00": false,
	} {
		cfg := Config{Environment: name, Destinations: []post.Destination{to("http://receiver.test/")}}
		found := slices.ContainsFunc(cfg.Validate(), func(p Problem) bool { return p.Path == "environment" })
		if found == good {
			t.Errorf("%q: refused is %v", name, found)
		}
	}
}

// More addresses than are remembered: the oldest goes.
func TestAddressesAreBounded(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	f, err := readFacts(t.Context(), db.pool)
	must(t, err)
	f.Addresses = []string{"host-0:5432/app"}
	must(t, recordFirst(t.Context(), db.pool, f.Identity))
	for i := range 2 * maxAddresses {
		f.Addresses = []string{fmt.Sprintf("host-%d:5432/app", i)}
		must(t, recordNews(t.Context(), db.pool, f.Identity))
		must(t, recordNews(t.Context(), db.pool, f.Identity)) // is no news
	}
	all := row[[]string](db, `SELECT addresses FROM outbox_identity`)
	if len(all) != maxAddresses || all[0] != "host-32:5432/app" || all[maxAddresses-1] != "host-63:5432/app" {
		t.Errorf("%d addresses: %v", len(all), all)
	}
}
