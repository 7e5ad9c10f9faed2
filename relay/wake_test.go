package relay

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMailboxLosesNothing(t *testing.T) {
	t.Parallel()
	m := newMailbox()
	for range 2 {
		m.commits.Add(2)
		m.post(agenda.CauseNotified)
		m.post(agenda.CauseSweep)
		m.post(agenda.CauseNotified)
		testkit.Equal(t, "nothing wakes the claimer", len(m.token), 1)
		if posted, commits := m.read(); posted != agenda.CauseNotified|agenda.CauseSweep || commits != 2 {
			t.Errorf("posted %s, %d commits", posted, commits)
		}
		if posted, commits := m.read(); posted != 0 || commits != 0 || len(m.token) != 0 {
			t.Errorf("again %s, %d commits, %d tokens", posted, commits, len(m.token))
		}
	}
}

// Where a commit takes long, producers that notify wait for each other, and are never so many that
// their number disarms the relay.
func TestProducersThatWaitForEachOtherDisarm(t *testing.T) {
	t.Parallel()
	_, db := relaytest.ServeCopy(t, localpg.Options{Settings: map[string]string{"wal_level": "replica", "max_wal_senders": "1"}})
	db.Route()
	r := sessionOf(t, config(db, to(relaytest.NewReceiver(t, nil).URL)))
	r.mailbox.listening.Store(true)
	c := r.newClaimer()
	turnOf(t, c)
	testkit.Equal(t, "armed while nothing happens", c.pace.Armed, true)
	db.Exec(`SELECT setval('outbox_armed', (extract(epoch FROM now() + interval '1 hour') * 1000)::bigint)`)
	// A commit that asks for a standby never ends from now on, and keeps the lock of its
	// notification.
	db.Exec(`ALTER SYSTEM SET synchronous_standby_names = 'absent'`)
	db.Exec(`SELECT pg_reload_conf()`)
	relaytest.Eventually(t, "the setting in a new session", func() bool {
		conn, err := pgx.Connect(t.Context(), db.DSN)
		relaytest.Must(t, err)
		defer conn.Close(t.Context())
		var names string
		relaytest.Must(t, conn.QueryRow(t.Context(), `SHOW synchronous_standby_names`).Scan(&names))
		return names == "absent"
	})
	db.Exec(`CHECKPOINT`) // the process that makes it has the setting then, and has given it to all
	var producers sync.WaitGroup
	defer producers.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, key := range []string{"first", "second"} {
		conn, err := pgx.Connect(t.Context(), db.DSN)
		relaytest.Must(t, err)
		producers.Go(func() {
			_, _ = conn.Exec(ctx, `BEGIN; SET LOCAL synchronous_commit = on; INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', '`+key+`'); COMMIT`)
			_ = conn.Close(context.WithoutCancel(ctx))
		})
	}
	relaytest.Becomes(db, 1, `SELECT count(*) FROM pg_locks WHERE NOT granted`)
	turnOf(t, c)
	testkit.Equal(t, "armed while nobody has notified", c.pace.Armed, true)
	relaytest.Eventually(t, "disarmed, since producers wait", func() bool {
		r.mailbox.commits.Add(1)
		r.mailbox.post(agenda.CauseNotified)
		c.readMailbox(time.Now())
		turnOf(t, c)
		return !c.pace.Armed
	})
	db.Insert(1, "waits for nobody")
}

// A relay that idles between polls looks when a retry is due.
func TestRetryWaitsForNoPoll(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "key")
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Number == 1 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to(rc.URL)
	d.Retry.Schedule = []time.Duration{10 * time.Millisecond}
	r := sessionOf(t, config(db, d))
	turn := func(c *claimer) (wait time.Duration) {
		wait = turnOf(t, c)
		r.senders.Wait()
		return wait
	}
	first := r.newClaimer()
	first.pace = agenda.Pace{Poll: time.Hour}
	turn(first)
	r.settler.Close()
	r.settler.Run(t.Context())
	r.senders.Settle = func(settle.Settlement) {}

	far := time.Now().Add(time.Hour)
	idle := r.newClaimer()
	idle.agenda = agenda.Agenda{}
	idle.pace = agenda.Pace{Poll: time.Second, Idle: true, Interval: time.Hour, NextPoll: far}
	relaytest.Eventually(t, "the retry", func() bool {
		wait := turn(idle)
		return rc.Total() == 2 || wait < 0 || wait > time.Second
	})
	testkit.Equal(t, "the relay idles, and nothing will wake it when the retry is due", rc.Total(), 2)
}

// At debug level each turn says what was due, and what is next.
func TestClaimerLogsWhyItActs(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "key")
	var log relaytest.Buffer
	cfg := config(db, to(relaytest.NewReceiver(t, nil).URL))
	cfg.Log = zerolog.New(&log)
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 1)
	r.stop()
	for _, want := range []string{`"due":"entry`, `"next":"poll"`} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("no turn says %s", want)
		}
	}
}
