package identity

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

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
		relaytest.Must(t, err)
		if got := Address(conn); got != want {
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
		testkit.Equal(t, name, strings.TrimPrefix(reasonOf(differences), "this is not the database that relays were accepted on: "), test.want)
		if got, want := onlyAddress(differences), name == "another address"; got != want {
			t.Errorf("%s: only the address differs: %v", name, got)
		}
	}
}

// More addresses than are remembered: the oldest goes.
func TestAddressesAreBounded(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	f, err := readFacts(t.Context(), db.Pool)
	relaytest.Must(t, err)
	f.Addresses = []string{"host-0:5432/app"}
	relaytest.Must(t, recordFirst(t.Context(), db.Pool, f.Identity))
	for i := range 2 * maxAddresses {
		f.Addresses = []string{fmt.Sprintf("host-%d:5432/app", i)}
		relaytest.Must(t, recordNews(t.Context(), db.Pool, f.Identity))
		relaytest.Must(t, recordNews(t.Context(), db.Pool, f.Identity)) // is no news
	}
	all := relaytest.Row[[]string](db, `SELECT addresses FROM outbox_identity`)
	if len(all) != maxAddresses || all[0] != "host-32:5432/app" || all[maxAddresses-1] != "host-63:5432/app" {
		t.Errorf("%d addresses: %v", len(all), all)
	}
}

// A relay that is quarantined is a reason why nothing is sent only where no other relay works.
func TestReasonNeedsThatNoRelayWorks(t *testing.T) {
	t.Parallel()
	r := Report{Recorded: &Identity{}, Quarantined: []QuarantinedRelay{{Reason: "a copy"}}}
	testkit.Equal(t, "reason", r.Reason(), "a copy")
	r.Foreign = "another server's"
	testkit.Equal(t, "reason", r.Reason(), "a copy")
	r.Working = []string{"w"}
	testkit.Equal(t, "reason of what concerns all", r.Reason(), "another server's")
	r.Foreign = ""
	testkit.Equal(t, "reason beside a relay that works", r.Reason(), "")
}

// What would be accepted, in words.
func TestAcceptable(t *testing.T) {
	t.Parallel()
	recorded := &Identity{SystemIdentifier: 1, DatabaseOID: 2, Environment: "production", Addresses: []string{"old:5432/app"}}
	found := Identity{SystemIdentifier: 3, DatabaseOID: 4, Timeline: 1, Addresses: []string{"laptop:15432/app"}}
	named := found
	named.Environment = "staging"
	waiting := func(environments ...string) (all []QuarantinedRelay) {
		for i, e := range environments {
			all = append(all, QuarantinedRelay{Name: "r", Environment: e, Address: fmt.Sprintf("new-%d:5432/app", i)})
		}
		return all
	}
	for name, test := range map[string]struct {
		report Report
		want   string
		err    error
	}{
		"no event waits":                 {Report{Recorded: recorded, Found: found}, "production [laptop:15432/app]", nil},
		"nothing is recorded":            {Report{Found: named}, "staging [laptop:15432/app]", nil},
		"relays wait":                    {Report{Recorded: recorded, Found: found, Quarantined: waiting("", "")}, "production [new-0:5432/app new-1:5432/app]", nil},
		"relays name their environment":  {Report{Recorded: recorded, Found: found, Quarantined: waiting("", "staging")}, "staging [new-0:5432/app new-1:5432/app]", nil},
		"they do not agree":              {Report{Recorded: recorded, Found: found, Quarantined: waiting("a", "b")}, "", ErrEnvironments},
		"one of them is meant":           {Report{Recorded: recorded, Found: named, Quarantined: waiting("a", "staging")}, "staging [new-1:5432/app]", nil},
		"others work, the name is new":   {Report{Recorded: recorded, Found: named, Working: []string{"w"}}, "", ErrInUse},
		"others work, under another URL": {Report{Recorded: recorded, Found: found, Working: []string{"w"}}, "production [laptop:15432/app old:5432/app]", nil},
	} {
		id, err := test.report.Acceptable()
		if !errors.Is(err, test.err) || err == nil && strings.TrimSpace(id.Environment+" "+fmt.Sprint(id.Addresses)) != test.want {
			t.Errorf("%s: %+v, %v", name, id, err)
		}
	}
}

// Hooks of the caller's pool are asked as well.
func TestGuardKeepsTheCallersHooks(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	g := NewGuard(Config{})
	for name, cfg := range map[string]*pgxpool.Config{
		"an error":  {PrepareConn: func(_ context.Context, _ *pgx.Conn) (bool, error) { return true, refused }},
		"a refusal": {BeforeAcquire: func(context.Context, *pgx.Conn) bool { return false }},
	} {
		g.Watch(cfg, pg.NewNames("", "outbox"), false)
		if fit, err := cfg.PrepareConn(t.Context(), nil); fit && err == nil {
			t.Errorf("%s: %v %v", name, fit, err)
		}
	}
}
