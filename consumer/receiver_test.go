package consumer_test

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// sentTo says to which of its destinations a relay sends an event.
func sentTo(destination string) func(http.Header) {
	return func(h http.Header) {
		h.Set(webhook.EventID, "4711")
		h.Set(webhook.DeliveryID, "4711-"+destination+"-1")
	}
}

// Two receivers in one database get the same events from one sender, as two destinations: each event takes effect in both.
func TestTwoReceiversOfOneSource(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		shop := newEnv(t, f, consumer.Config{Receiver: "shop"}, effect)
		chi := newEnvAt(t, f, shop.dsn, consumer.Config{Receiver: "chi"}, effect)
		const events = 20
		for i := range events {
			key := strconv.Itoa(i)
			wantFirst(t, shop.do(shop.newRequest(key, "{}", sentTo("shop"))), http.StatusCreated, `{"done":"`+key+`"}`)
			wantFirst(t, chi.do(chi.newRequest(key, "{}", sentTo("chi"))), http.StatusCreated, `{"done":"`+key+`"}`)
			wantReplayed(t, shop.do(shop.newRequest(key, "{}", sentTo("shop"))), http.StatusCreated, "")
		}
		if n := shop.count("SELECT count(*) FROM effect"); n != 2*events {
			t.Errorf("%d effects, want %d", n, 2*events)
		}
	})
}

// Two receivers that were given one name: the second destination's events are refused, and the log says what to set.
func TestOtherDestinationIsRefused(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		wantFirst(t, e.do(e.newRequest("k", "{}", sentTo("shop-eu"))), http.StatusCreated, `{"done":"k"}`)
		e.wantResult(consumer.ResultProcessed)
		for _, body := range []string{"{}", "[]"} { // a body may differ from one destination to the next
			wantProblem(t, e.do(e.newRequest("k", body, sentTo("shop"))), http.StatusMisdirectedRequest, "other-destination")
			e.wantResult(consumer.ResultOtherDestination)
		}
		e.wantRows("k", 1, 1)
		for _, part := range []string{"level=ERROR", `as another destination than \"shop\"`, `Config.Receiver (\"test\")`, "Receiver of its own"} {
			if !strings.Contains(e.logged.String(), part) {
				t.Errorf("not logged: %s in %s", part, e.logged)
			}
		}
		wantReplayed(t, e.do(e.newRequest("k", "{}", sentTo("shop-eu"))), http.StatusCreated, "")
		wantReplayed(t, e.do(e.newRequest("k", "{}")), http.StatusCreated, "") // whose sender does not say
	})
}

// A request that a relay signed for one destination is brought to another receiver, which has the same secret.
func TestRequestForAnotherDestinationIsRefused(t *testing.T) {
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{Destinations: []string{"chi", "shop-eu"}}, effect)
	for _, sent := range []func(http.Header){sentTo("shop"), sentTo(""), func(http.Header) {}} {
		wantProblem(t, e.do(e.newRequest("k", "{}", sent)), http.StatusMisdirectedRequest, "wrong-destination")
		e.wantResult(consumer.ResultRejected)
	}
	e.wantRows("k", 0, 0)
	wantFirst(t, e.do(e.newRequest("k", "{}", sentTo("shop-eu"))), http.StatusCreated, `{"done":"k"}`)
	wantReplayed(t, e.do(e.newRequest("k", "{}", sentTo("shop-eu"))), http.StatusCreated, "")
}

// The same of an inbox.
func TestInboxRefusesAnotherDestination(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.record("k", sentTo("shop"))
	wantProblem(t, p.do(p.newRequest("k", "[]", sentTo("chi"))), http.StatusMisdirectedRequest, "other-destination")
	wantReplayed(t, p.do(p.newRequest("k", `{"key":"k"}`, sentTo("shop"))), http.StatusOK, `{"state":"pending"}`+"\n")
	other := p.again(inbox.Config{Config: consumer.Config{Receiver: "chi"}})
	other.record("k", sentTo("chi"))
	p.run()
	other.run()
	p.wantWorked("k", consumer.ResultProcessed)
	other.wantWorked("k", consumer.ResultProcessed)
	if n := p.count("SELECT count(*) FROM effect"); n != 2 {
		t.Errorf("%d effects, want 2", n)
	}
}

// One receiver that two destinations lead to, such as a URL and a stream, names both: an event that comes from both counts once.
func TestTwoDestinationsOfOneReceiver(t *testing.T) {
	both := []string{"web", "stream"}
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{Destinations: both}, effect)
		for key, ways := range map[string][2]string{"a": {"web", "stream"}, "b": {"stream", "web"}} {
			wantFirst(t, e.do(e.newRequest(key, "{}", sentTo(ways[0]))), http.StatusCreated, `{"done":"`+key+`"}`)
			wantReplayed(t, e.do(e.newRequest(key, "{}", sentTo(ways[1]))), http.StatusCreated, "")
			wantProblem(t, e.do(e.newRequest(key, "[]", sentTo(ways[1]))), http.StatusUnprocessableEntity, "key-reused")
			e.wantRows(key, 1, 1)
		}
	})
	t.Run("inbox", func(t *testing.T) {
		t.Parallel()
		p := newInbox(t, inbox.Config{Config: consumer.Config{Destinations: both}})
		p.record("k", sentTo("web"))
		wantReplayed(t, p.do(p.newRequest("k", `{"key":"k"}`, sentTo("stream"))), http.StatusOK, `{"state":"pending"}`+"\n")
	})
}
