package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/alerts"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A chat is an HTTP server that keeps what it is told and answers with a status.
type chat struct {
	*httptest.Server
	mu     sync.Mutex
	bodies []string
}

func newChat(t *testing.T, answer http.HandlerFunc) *chat {
	t.Helper()
	c := &chat{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		c.mu.Lock()
		c.bodies = append(c.bodies, string(body))
		c.mu.Unlock()
		answer(w, r)
	}))
	t.Cleanup(func() {
		c.CloseClientConnections()
		c.Close()
	})
	return c
}

func (c *chat) all() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.bodies, "\n")
}

func respond(code int, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, text)
	}
}

const gotifyToken = "Aaa.bbb.ccc.ddd"

// gotify is a service that can be had on any host, over plain HTTP.
func gotify(server *httptest.Server) settings.Secret {
	return settings.Secret("gotify://" + strings.TrimPrefix(server.URL, "http://") + "/" + gotifyToken + "?disabletls=yes")
}

func TestAlertTest(t *testing.T) {
	t.Parallel()
	good := newChat(t, respond(200, `{"id": 1}`))
	bad := newChat(t, respond(500, "out of \x1b[31morder"))
	file := writeFile(t, filepath.Join(t.TempDir(), usualFile), "alerts:\n  channels:\n"+
		"  - {webhook: '"+good.URL+"/hook-s3cret'}\n  - {slack: '"+bad.URL+"/slack-s3cret'}\n  - {service: '"+string(gotify(good.Server))+"'}\n")

	all := command(nil, "alerts", "test", "--config", file)
	all.holds(t, cli.ExitFound, "", "1 of 3 channels did not take the alert")
	if strings.Contains(all.stdout+all.stderr, "s3cret") || strings.Contains(all.stdout+all.stderr, gotifyToken) || strings.Contains(all.stdout, "\x1b") {
		t.Errorf("a secret, or a control character, in %+v", all)
	}
	if strings.Count(all.stdout, "  ok\n") != 2 || !strings.Contains(all.stdout, "500 Internal Server Error: out of") {
		t.Errorf("%s", all.stdout)
	}
	if told := good.all(); strings.Count(told, "This is a test of the alert channels") != 2 {
		t.Errorf("the channels heard %s", told)
	}

	var results []alerts.Result
	asked := command(nil, "alerts", "test", "--config", file, "--channel", "gotify", "--json")
	if err := json.Unmarshal([]byte(asked.stdout), &results); err != nil || asked.code != 0 || len(results) != 1 || !results[0].OK || !strings.HasPrefix(results[0].Channel, "gotify-") {
		t.Errorf("%v %+v", err, asked)
	}
	command(nil, "alerts", "test", "--config", file, "--channel", "pager").holds(t, cli.ExitUsage, "", `there is no channel "pager"; there are webhook-`)
	empty := writeFile(t, filepath.Join(t.TempDir(), usualFile), "log: {level: info}\n")
	command(nil, "alerts", "test", "--config", empty).holds(t, cli.ExitFailed, "", "no channel is configured")
}

// The settings of egress bind the channels of alerts test. What each service does under them is
// tested in internal/notify.
func TestSecurityAlertTestObeysEgress(t *testing.T) {
	t.Parallel()
	reached := newChat(t, respond(200, `{"id": 1}`))
	for url, want := range map[string]string{
		strings.Replace(string(gotify(reached.Server)), "127.0.0.1", "0.0.0.0", 1): "prohibited",
		string(gotify(reached.Server)):                                             "egress.allow_private",
	} {
		file := writeFile(t, filepath.Join(t.TempDir(), usualFile), "egress: {allow_private: []}\nalerts: {channels: [{service: '"+url+"'}]}\n")
		if r := command(nil, "alerts", "test", "--config", file); r.code != cli.ExitFound || !strings.Contains(r.stdout, want) {
			t.Errorf("%+v lacks %q", r, want)
		}
	}
	testkit.Equal(t, "a forbidden address was sent", reached.all(), "")
}

func TestServiceURLIsMasked(t *testing.T) {
	t.Parallel()
	shown := command(append([]string{"OUTBOX_ALERTS_CHANNELS_SERVICE=pushover://shoutrrr:s3cret@user-s3cret"}, twoSettings...), "config", "show")
	if !strings.Contains(shown.stdout, "service: pushover://") || strings.Contains(shown.stdout+shown.stderr, "s3cret") {
		t.Errorf("%+v", shown)
	}
}
