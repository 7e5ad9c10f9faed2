package relay

import (
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/alert"
)

// An alert's channel reaches no more than a destination does, in whatever spelling, and follows no redirect. Of those that
// are refused, what spells this host leads to a listener, which sees nothing.
func TestSecurityChannelsReachNoForbiddenAddress(t *testing.T) {
	t.Parallel()
	var reached atomic.Int64
	trap := newReceiver(t, func(http.ResponseWriter, request) { reached.Add(1) })
	_, port, err := net.SplitHostPort(trap.Listener.Addr().String())
	must(t, err)
	redirect := newReceiver(t, func(w http.ResponseWriter, _ request) {
		w.Header().Set("Location", trap.URL)
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	urls := []string{redirect.URL, "http://user:s3cret@" + strings.TrimPrefix(redirect.URL, "http://")}
	for _, host := range []string{
		"0.0.0.0", "[::]", "[::ffff:0.0.0.0]", "[::ffff:0:0]", "⓪.0.0.0", "0。0。0。0", "[::127.0.0.1]",
		"[64:ff9b::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2606:4700::5efe:7f00:1]",
		"169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::a9fe:a9fe%25lo]", "168.63.129.16", "100.100.100.200", "[fd00:ec2::254]", "224.0.0.1",
	} {
		urls = append(urls, "http://"+host+":"+port+"/")
	}
	for _, url := range urls {
		for _, channel := range []alert.Channel{alert.Slack(url, direct), alert.Webhook(url, direct)} {
			err := channel.Notify(t.Context(), alert.Alert{Rule: alert.RuleFailed, Subject: "default", Count: 1, OpenedAt: time.Now()})
			redirected := strings.Contains(url, strings.TrimPrefix(redirect.URL, "http://"))
			if err == nil || !strings.Contains(err.Error(), "prohibited") && !redirected {
				t.Errorf("%s: %v", url, err)
			}
			if err != nil && strings.Contains(err.Error(), "s3cret") {
				t.Errorf("a password is shown: %v", err)
			}
		}
	}
	if reached.Load() > 0 {
		t.Errorf("%d requests arrived", reached.Load())
	}
}
