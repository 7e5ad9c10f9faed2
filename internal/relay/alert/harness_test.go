package alert_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// A pager is a channel that remembers its notifications.
type pager struct {
	name   string
	answer func(n int) error // to the nth notification; nil: always accepted

	mu   sync.Mutex
	told []alert.Alert
}

func (p *pager) Name() string { return p.name }

func (p *pager) Notify(_ context.Context, a alert.Alert) error {
	p.mu.Lock()
	p.told = append(p.told, a)
	n := len(p.told)
	p.mu.Unlock()
	if p.answer != nil {
		return p.answer(n)
	}
	return nil
}

// all returns the notifications in the order in which they came.
func (p *pager) all() []alert.Alert {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.told)
}

// heard returns "rule state" of every notification, sorted.
func (p *pager) heard() (all []string) {
	for _, a := range p.all() {
		all = append(all, a.Rule+" "+a.State())
	}
	slices.Sort(all)
	return all
}

func (p *pager) last() alert.Alert { all := p.all(); return all[len(all)-1] }

// newSender returns the sender of one relay of the database, which sends what fires at once.
func newSender(db *relaytest.Database, channels ...alert.Channel) *alert.Sender {
	cfg := alert.Config{Channels: channels, After: 1, AfterByRule: map[string]time.Duration{alert.RuleFailed: 0}}.WithDefaults()
	return &alert.Sender{
		DB: db.Pool, Config: func() alert.Config { return cfg }, Alive: func() bool { return true }, Log: zerolog.Nop(),
		Always: func(ctx context.Context) context.Context { return ctx },
		Failed: func(operation string, err error) { db.Errorf("%s: %v", operation, err) },
	}
}

// fire opens an alert, or counts it once more, as the statements that detect a condition do.
func fire(db *relaytest.Database, rule string) {
	db.Helper()
	db.Exec(`INSERT INTO outbox_alert AS a (rule, subject, detail) VALUES ($1, 's', 'detail')
		ON CONFLICT (rule, subject) DO UPDATE SET count = a.count + 1, last_at = now()`, rule)
}

func resolve(db *relaytest.Database, rule string) {
	db.Helper()
	db.Exec(`UPDATE outbox_alert SET resolved_at = now() WHERE rule = $1`, rule)
}

// pass moves what is stored of alerts into the past.
func pass(db *relaytest.Database, t time.Duration) {
	db.Helper()
	db.Exec(`UPDATE outbox_alert SET opened_at = opened_at - $1::interval, last_at = last_at - $1::interval, resolved_at = resolved_at - $1::interval,
		due_at = due_at - $1::interval`, t)
	db.Exec(`UPDATE outbox_alert_notice SET sent_at = sent_at - $1::interval, claimed_until = claimed_until - $1::interval`, t)
}

// A chat is a service that remembers the bodies of all requests.
type chat struct {
	*httptest.Server
	mu     sync.Mutex
	bodies [][]byte
}

// newChat starts a chat; a nil answer is 200.
func newChat(t testing.TB, answer http.HandlerFunc) *chat {
	t.Helper()
	c := &chat{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		c.mu.Lock()
		c.bodies = append(c.bodies, body)
		c.mu.Unlock()
		if answer != nil {
			answer(w, r)
		}
	}))
	t.Cleanup(func() {
		c.CloseClientConnections()
		c.Close()
	})
	return c
}

func (c *chat) all() [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.bodies)
}
