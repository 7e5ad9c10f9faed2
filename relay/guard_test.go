package relay

import (
	"errors"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/identity"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// The acceptance of the guard in figures: a copy of a database with a thousand pending events, under the configuration
// of the original.
func TestCopyOfAThousandEvents(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const events = 1000
	for name, discard := range map[string]bool{"accepted": false, "discarded": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			cfg := db.config(to("http://receiver.test/"))
			db.visited(cfg)
			db.insert(events, "original")
			db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 day' WHERE event_id % 2 = 0`)
			copied := db.fromTemplate()
			rc := newReceiver(t, nil)
			cfg = copied.config(to(rc.URL))
			r := startGuarded(t, cfg)
			r.wantReason(t, "database oid")
			copied.insert(1, "while quarantined")
			outbox := ops.New(copied.pool)
			report, err := outbox.Identity(t.Context(), "")
			must(t, err)
			if len(report.Quarantined) != 1 || report.Reason() == "" || len(report.Working) != 0 || rc.total() != 0 {
				t.Fatalf("%d requests, %+v", rc.total(), report)
			}
			t.Logf("quarantined: %d requests of %d events pending: %s", rc.total(), events, report.Reason())
			if discard {
				var progress []int64
				b, err := outbox.DiscardQuarantined(t.Context(), "", func(b ops.Bulk) { progress = append(progress, b.Done) })
				must(t, err)
				if b.Done != events+1 || !slices.Equal(progress, []int64{1000, events + 1}) {
					t.Errorf("discarded %d, in steps %v", b.Done, progress)
				}
				if n := row[int](copied, `SELECT count(*) FROM outbox_delivery WHERE status = 'discarded' AND last_reason = 'quarantined'`); n != events+1 {
					t.Errorf("%d are marked", n)
				}
			} else {
				copied.exec(`UPDATE outbox_delivery SET next_attempt_at = now()`)
			}
			_, err = outbox.AcceptIdentity(t.Context(), "")
			must(t, err)
			r.quarantined(t, 2)
			if discard {
				copied.insert(10, "new")
				r.settles(t, policy.Delivered, 10)
				if slices.ContainsFunc(rc.keys(), func(key string) bool { return !strings.HasPrefix(key, "new-") }) || rc.total() != 10 {
					t.Errorf("sent %v", rc.keys())
				}
			} else {
				r.settles(t, policy.Delivered, events+1)
				if rc.total() != events+1 {
					t.Errorf("%d requests", rc.total())
				}
			}
			t.Logf("%s: %d requests afterwards", name, rc.total())
			if err := report.Discardable(); err != nil {
				t.Error(err)
			}
			if _, err := outbox.DiscardQuarantined(t.Context(), "", nil); !errors.Is(err, identity.ErrInUse) {
				t.Errorf("discarding under a relay that works: %v", err)
			}
		})
	}
}

// The first name counts; who has none takes part; who has another waits until a person decides.
func TestEnvironments(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc, wrong := newReceiver(t, nil), newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	nameless := startGuarded(t, cfg)
	nameless.instance()
	if got := row[string](db, `SELECT environment FROM outbox_identity`); got != "" {
		t.Errorf("environment %q", got)
	}
	cfg.Name, cfg.Environment = "real", "production"
	production := startGuarded(t, cfg)
	production.instance()
	cfg = db.config(to(wrong.URL))
	cfg.Name, cfg.Environment = "stray", "staging"
	staging := startGuarded(t, cfg)
	staging.wantReason(t, `environment is "staging", recorded is "production"`)
	db.insert(100, "key")
	becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
	if wrong.total() != 0 || rc.total() != 100 {
		t.Errorf("%d and %d requests", wrong.total(), rc.total())
	}

	outbox := ops.New(db.pool)
	for _, environment := range []string{"", "staging"} { // relays that work keep it, whatever a new one says
		if _, err := outbox.AcceptIdentity(t.Context(), environment); !errors.Is(err, identity.ErrInUse) || !strings.Contains(err.Error(), "real") {
			t.Errorf("accepting %q while others work: %v", environment, err)
		}
	}
	// No relay rescues the stray, and the stray rescues no relay.
	if rescued := len(nameless.rescued) + len(production.rescued) + len(staging.rescued); rescued != 0 {
		t.Errorf("%d rescues", rescued)
	}
	nameless.stop()
	production.stop()
	id, err := outbox.AcceptIdentity(t.Context(), "")
	must(t, err)
	if id.Environment != "staging" {
		t.Errorf("accepted %+v", id)
	}
	if reason := staging.quarantined(t, 2); reason != "" {
		t.Error(reason)
	}
	db.insert(10, "more")
	becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
	if wrong.total() != 10 {
		t.Errorf("%d requests", wrong.total())
	}
}

// A relay that works stops when a person decides for another environment.
func TestDecisionReachesRelaysThatWork(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to("http://receiver.test/"))
	cfg.Environment = "production"
	r := preparedGuarded(t, cfg)
	guarding := r.guardConfig()
	guarding.Interval = 0
	r.session.Guard = identity.NewGuard(guarding)
	r.begin()
	r.instance()
	db.exec(`UPDATE outbox_identity SET environment = 'staging'`)
	r.wantReason(t, `environment is "production", recorded is "staging"`)
	if _, alive := r.current(); alive {
		t.Error("still alive")
	}
}

// A pooler may lead elsewhere from one statement to the next: none is run there.
func TestPoolerThatLeadsToACopy(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, direct := range map[string]bool{"no session": false, "a session of its own": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, db := serve(t, localpg.Options{})
			db.route()
			l := newLink(t, db.dsn)
			rc := newReceiver(t, nil)
			cfg := db.config(to(rc.URL))
			cfg.Pool = settings(t, l.dsn)
			cfg.Pooler.Mode = PoolerTransaction
			if direct {
				cfg.Pooler.Session = settings(t, db.dsn)
			}
			r := startGuarded(t, cfg)
			db.insert(10, "before")
			r.settles(t, policy.Delivered, 10)
			copied := db.dumped(pgtest.Start(t, localpg.Options{}).DSN(""))
			copied.insert(50, "copy")
			before := row[string](copied, written)
			l.lead(t, copied.dsn)
			l.cut()
			if direct {
				r.await(t, "refused statements", func(o *observer) bool { return o.failures["claim"]+o.failures["session"] >= 2 })
			} else {
				r.wantReason(t, "system identifier")
			}
			if after := row[string](copied, written); after != before || rc.total() != 10 {
				t.Errorf("the copy has changed, or %d requests are not 10", rc.total())
			}
			l.lead(t, db.dsn)
			l.cut()
			db.insert(10, "after")
			r.settles(t, policy.Delivered, 20)
			if rc.total() != 20 {
				t.Errorf("%d requests", rc.total())
			}
		})
	}
}

// A new spelling of the address is good while a relay works there, and is remembered; with no relay to vouch it is not.
func TestSpellingsOfTheAddress(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	links := []*link{newLink(t, db.dsn), newLink(t, db.dsn), newLink(t, db.dsn)}
	config := func(l *link) Config {
		cfg := db.config(to("http://receiver.test/"))
		cfg.Pool = settings(t, l.dsn)
		return cfg
	}
	first, second := startGuarded(t, config(links[0])), startGuarded(t, config(links[1]))
	first.instance() // together: the second may have to wait for the first
	second.instance()
	if n := row[int](db, `SELECT cardinality(addresses) FROM outbox_identity`); n != 2 {
		t.Errorf("%d addresses", n)
	}
	first.stop()
	second.stop()
	startGuarded(t, config(links[1])).stop() // known by now
	// A row without its session is no proof of a living relay, however fresh it is, and whichever session has the pid.
	db.exec(`INSERT INTO outbox_relay (name, version, heartbeat_at, session_pid) VALUES ('copied', '', now() + interval '1 hour', pg_backend_pid())`)
	third := startGuarded(t, config(links[2]))
	third.wantReason(t, "its address is")
	if len(first.reasons)+len(second.reasons) != 0 {
		t.Errorf("false alarms: %v %v", first.reasons, second.reasons)
	}
	witness := startGuarded(t, config(links[0]))
	witness.instance()
	if reason := third.quarantined(t, 2); reason != "" {
		t.Error(reason)
	}
	third.instance()
}

// Two relays under two addresses start together: who comes first waits for the other in silence.
func TestWitnessThatStartsLater(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	known := db.config(to("http://receiver.test/"))
	db.visited(known)
	cfg := known
	cfg.Pool = settings(t, newLink(t, db.dsn).dsn)
	early := preparedGuarded(t, cfg)
	guarding := early.guardConfig()
	guarding.Grace = time.Hour
	early.session.Guard = identity.NewGuard(guarding)
	early.begin()
	becomes(db, 1, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NOT NULL`)
	start(t, known).instance()
	early.instance()
	if len(early.reasons) != 0 || row[int](db, `SELECT count(*) FROM outbox_alert`) != 0 {
		t.Errorf("a false alarm: %v", early.reasons)
	}
}

// A relay that is quarantined vouches for no other.
func TestQuarantinedRelayIsNoWitness(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	db.visited(db.config(to("http://receiver.test/")))
	var relays []*guarded
	for range 3 {
		cfg := db.config(to("http://receiver.test/"))
		cfg.Pool = settings(t, newLink(t, db.dsn).dsn)
		relays = append(relays, startGuarded(t, cfg))
	}
	for _, r := range relays {
		r.wantReason(t, "its address is")
	}
	becomes(db, 3, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NOT NULL`)
	becomes(db, 1, `SELECT count(*) FROM outbox_alert WHERE rule = 'quarantined'`)
	report, err := ops.New(db.pool).Identity(t.Context(), "")
	must(t, err)
	if len(report.Differences) != 0 || report.Reason() == "" || len(report.Quarantined) != 3 {
		t.Errorf("%+v", report)
	}
	id, err := ops.New(db.pool).AcceptIdentity(t.Context(), "")
	must(t, err)
	if len(id.Addresses) != 3 { // those of the relays that wait, not of who accepts
		t.Errorf("accepted %v", id.Addresses)
	}
	for _, r := range relays {
		r.quarantined(t, 2)
		r.instance()
	}
}

// Many relays start at once on a database that no relay has seen: one of them records it, and who does not agree waits.
func TestFirstRelaysRace(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	relays := make([]*guarded, 6)
	var starting sync.WaitGroup
	for i := range relays {
		cfg := db.config(to("http://receiver.test/"))
		cfg.Environment = []string{"production", "staging"}[i%2]
		starting.Go(func() { relays[i] = startGuarded(t, cfg) })
	}
	starting.Wait()
	becomes(db, 3, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NOT NULL`)
	becomes(db, 3, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NULL`)
	recorded := row[string](db, `SELECT environment FROM outbox_identity`)
	for _, r := range relays {
		if r.cfg.Environment == recorded {
			r.instance()
		} else {
			r.wantReason(t, "environment")
		}
	}
}

// A copy is what it is from the first look on: a relay that was never there before does not record it.
func TestCopyWithoutRelays(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.visited(db.config(to("http://receiver.test/")))
	copied := db.fromTemplate()
	report, err := ops.New(copied.pool).Identity(t.Context(), "")
	must(t, err)
	if report.Reason() == "" || report.Discardable() != nil {
		t.Errorf("%+v: %v", report, report.Discardable())
	}
	untouched := newDatabase(t)
	report, err = ops.New(untouched.pool).Identity(t.Context(), "")
	must(t, err)
	if report.Recorded != nil || report.Reason() != "" || !errors.Is(report.Discardable(), identity.ErrNotQuarantined) {
		t.Errorf("of a database that no relay has seen: %+v", report)
	}
}

// Who looks at the original from elsewhere may not give up its events.
func TestOriginalSeenFromElsewhere(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.visited(db.config(to("http://receiver.test/")))
	db.insert(5, "key")
	outbox := ops.New(pgtest.Pool(t, newLink(t, db.dsn).dsn))
	report, err := outbox.Identity(t.Context(), "")
	must(t, err)
	if len(report.Differences) != 1 || report.Differences[0].What != "address" || report.Reason() != "" {
		t.Errorf("%+v", report)
	}
	if _, err := outbox.DiscardQuarantined(t.Context(), "", nil); !errors.Is(err, identity.ErrNotQuarantined) {
		t.Errorf("discarding: %v", err)
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`); n != 5 {
		t.Errorf("%d are pending", n)
	}
}

// A server that tells strangers nothing of its control file: what is left is compared.
func TestServerThatTellsNothing(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	db := newDatabase(t)
	db.exec(`REVOKE EXECUTE ON FUNCTION pg_control_system(), pg_control_checkpoint() FROM PUBLIC`)
	rolesLock.Lock()
	db.exec(`DO $$ BEGIN
		IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'no_superuser') THEN CREATE ROLE no_superuser LOGIN; END IF;
	END $$;
	GRANT ALL ON ALL TABLES IN SCHEMA public TO no_superuser`)
	rolesLock.Unlock()
	u, err := url.Parse(db.dsn)
	must(t, err)
	u.User = url.User("no_superuser")
	cfg := db.config(to("http://receiver.test/"))
	cfg.Pool = settings(t, u.String())
	r := startGuarded(t, cfg)
	r.instance()
	if got := row[string](db, `SELECT concat_ws(' ', system_identifier, timeline, database_oid > 0) FROM outbox_identity`); got != "0 0 t" {
		t.Errorf("recorded %s", got)
	}
	r.stop()
	tells := startGuarded(t, db.config(to("http://receiver.test/"))) // a superuser
	tells.instance()
	if !row[bool](db, `SELECT system_identifier <> 0 AND timeline = 1 FROM outbox_identity`) {
		t.Error("what the server tells now is not recorded")
	}
	tells.stop()
	cfg.Environment = "production"
	again := startGuarded(t, cfg) // and is kept, beside news
	again.instance()
	if !row[bool](db, `SELECT system_identifier <> 0 AND timeline = 1 AND environment = 'production' FROM outbox_identity`) {
		t.Error("what was recorded is lost")
	}
}

// Behind a pooler no relay has a session: a heartbeat that moves while one looks vouches as well.
func TestHeartbeatIsAWitness(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	db.visited(db.config(to("http://receiver.test/")))
	db.exec(`INSERT INTO outbox_relay (name, version, lease, heartbeat_at) VALUES ('pooled', '', '1 hour', now())`)
	cfg := db.config(to("http://receiver.test/"))
	cfg.Pool = settings(t, newLink(t, db.dsn).dsn)
	r := startGuarded(t, cfg)
	r.wantReason(t, "its address is") // one that stands still is copied
	db.exec(`UPDATE outbox_relay SET heartbeat_at = now() WHERE name = 'pooled'`)
	if reason := r.quarantined(t, 2); reason != "" {
		t.Error(reason)
	}
}
