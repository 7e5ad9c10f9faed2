package alert

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A recorder is a channel that remembers what it was sent.
type recorder struct {
	sent   []string
	alerts []Alert
}

func (*recorder) Name() string { return "recorder" }

func (c *recorder) Notify(_ context.Context, a Alert) error {
	c.alerts = append(c.alerts, a)
	c.sent = append(c.sent, a.State())
	if a.FirstError != "" {
		c.sent[len(c.sent)-1] += " " + a.FirstError
	}
	return nil
}

// What a relay sees of its database is sent without it: once it has lasted, and when it has ended.
func TestTroubleWithTheDatabaseIsSent(t *testing.T) {
	t.Parallel()
	lost, full := errors.New("connection lost"), &pgconn.PgError{Code: "53100", Message: "no space left"}
	for name, c := range map[string]struct {
		steps string // of seconds: l lost, f full, w works, k a lock, s claims are stuck, u they work, . nothing
		want  string
	}{
		"a restart":                 {strings.Repeat("l", 20) + strings.Repeat("w", 100), ""},
		"an outage":                 {strings.Repeat("l", 100) + "w....", "45s firing connection lost, 1m40s resolved connection lost"},
		"no disk, while reads work": {strings.Repeat("fw", 50) + strings.Repeat("w", 60), "45s firing : no space left (SQLSTATE 53100), 2m8s resolved : no space left (SQLSTATE 53100)"},
		"a lock is no trouble":      {strings.Repeat("k", 100), ""},
		"an outage that ends with another error": {
			strings.Repeat("l", 50) + strings.Repeat("f", 50) + strings.Repeat("w", 31), "45s firing connection lost, 2m9s resolved connection lost",
		},
		"another outage": {strings.Repeat("l", 60) + strings.Repeat("w", 10) + strings.Repeat("l", 60) + "w", "45s firing connection lost, 1m0s resolved connection lost, 1m55s firing connection lost, 2m10s resolved connection lost"},
		"claims that fail, while beats work": {
			strings.Repeat("sw", 50) + "u" + strings.Repeat("w", 20), "45s firing nothing is claimed: : permission denied (SQLSTATE 42501): the role lacks a right: run migrations/roles.sql and grant it outbox_relay, 1m40s resolved nothing is claimed: : permission denied (SQLSTATE 42501): the role lacks a right: run migrations/roles.sql and grant it outbox_relay",
		},
		"claims that fail for ten seconds": {strings.Repeat("sw", 5) + "u" + strings.Repeat("w", 60), ""},
		"one that no statement has seen":   {strings.Repeat(".", 100), ""},
	} {
		channel, trouble := &recorder{}, &Trouble{}
		s := &Sender{
			Config: func() Config { return Config{Channels: []Channel{channel}}.WithDefaults() }, Trouble: trouble, Relay: "r1", Log: zerolog.Nop(),
		}
		var got []string
		for second, what := range c.steps {
			switch what {
			case 'l':
				trouble.Failed(at(second), lost)
			case 'f':
				trouble.Failed(at(second), full)
			case 'k':
				trouble.Failed(at(second), &pgconn.PgError{Code: "55P03"})
			case 's':
				trouble.Stuck(at(second), at(0), &pgconn.PgError{Code: "42501", Message: "permission denied"})
			case 'u':
				trouble.Unstuck(at(second))
			case 'w':
				trouble.Worked(at(second))
			}
			before := len(channel.sent)
			s.sendTrouble(t.Context(), at(second), channel.Name())
			for _, sent := range channel.sent[before:] {
				got = append(got, fmt.Sprint(time.Duration(second)*time.Second, " ", sent))
			}
		}
		testkit.Equal(t, name+": got", strings.Join(got, ", "), c.want)
	}
}

// An alert names the database, and of several outboxes the entry, also where nothing can be read of
// the database.
func TestTroubleNamesTheDatabase(t *testing.T) {
	t.Parallel()
	channel, trouble := &recorder{}, &Trouble{Database: "shop-db:5432/shop"}
	s := &Sender{Config: func() Config { return Config{Channels: []Channel{channel}}.WithDefaults() }, Trouble: trouble, Entry: "billing", Relay: "r1", Log: zerolog.Nop()}
	now := time.Now()
	trouble.Failed(now, errors.New("no route to host"))
	s.sendTrouble(t.Context(), now.Add(time.Minute), channel.Name())
	if len(channel.alerts) != 1 {
		t.Fatalf("%d alerts", len(channel.alerts))
	}
	text := channel.alerts[0].Text()
	for _, want := range []string{`Relay "r1" has trouble with its database "shop-db:5432/shop": no route to host. `, `Database "shop-db:5432/shop", entry "billing", relay "r1".`} {
		if !strings.Contains(text, want) {
			t.Errorf("without %s: %s", want, text)
		}
	}
}
