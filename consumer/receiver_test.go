package consumer_test

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

// Two receivers in one database get the same events from one sender, as two destinations: each event takes effect in both.
func TestTwoReceiversOfOneSource(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		shop := receivertest.NewEnv(t, f, consumer.Config{Receiver: "shop"}, receivertest.Effect)
		chi := receivertest.NewEnvAt(t, f, shop.DSN, consumer.Config{Receiver: "chi"}, receivertest.Effect)
		const events = 20
		for i := range events {
			key := strconv.Itoa(i)
			receivertest.WantFirst(t, shop.Do(shop.NewRequest(key, "{}", receivertest.SentTo("shop"))), http.StatusCreated, `{"done":"`+key+`"}`)
			receivertest.WantFirst(t, chi.Do(chi.NewRequest(key, "{}", receivertest.SentTo("chi"))), http.StatusCreated, `{"done":"`+key+`"}`)
			receivertest.WantReplayed(t, shop.Do(shop.NewRequest(key, "{}", receivertest.SentTo("shop"))), http.StatusCreated, "")
		}
		if n := shop.Count("SELECT count(*) FROM effect"); n != 2*events {
			t.Errorf("%d effects, want %d", n, 2*events)
		}
	})
}

// Two receivers that were given one name: the second destination's events are refused, and the log says what to set.
func TestOtherDestinationIsRefused(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		receivertest.WantFirst(t, e.Do(e.NewRequest("k", "{}", receivertest.SentTo("shop-eu"))), http.StatusCreated, `{"done":"k"}`)
		e.WantResult(consumer.ResultProcessed)
		for _, body := range []string{"{}", "[]"} { // a body may differ from one destination to the next
			receivertest.WantProblem(t, e.Do(e.NewRequest("k", body, receivertest.SentTo("shop"))), http.StatusMisdirectedRequest, "other-destination")
			e.WantResult(consumer.ResultOtherDestination)
		}
		e.WantRows("k", 1, 1)
		for _, part := range []string{"level=ERROR", `as another destination than \"shop\"`, `Config.Receiver (\"test\")`, "its own Receiver"} {
			if !strings.Contains(e.Logged.String(), part) {
				t.Errorf("not logged: %s in %s", part, e.Logged)
			}
		}
		receivertest.WantReplayed(t, e.Do(e.NewRequest("k", "{}", receivertest.SentTo("shop-eu"))), http.StatusCreated, "")
		receivertest.WantReplayed(t, e.Do(e.NewRequest("k", "{}")), http.StatusCreated, "") // whose sender does not say
	})
}

// A request that a relay signed for one destination is brought to another receiver, which has the same secret.
func TestRequestForAnotherDestinationIsRefused(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Destinations: []string{"chi", "shop-eu"}}, receivertest.Effect)
	for _, sent := range []func(http.Header){receivertest.SentTo("shop"), receivertest.SentTo(""), func(http.Header) {}} {
		receivertest.WantProblem(t, e.Do(e.NewRequest("k", "{}", sent)), http.StatusMisdirectedRequest, "wrong-destination")
		e.WantResult(consumer.ResultRejected)
	}
	e.WantRows("k", 0, 0)
	receivertest.WantFirst(t, e.Do(e.NewRequest("k", "{}", receivertest.SentTo("shop-eu"))), http.StatusCreated, `{"done":"k"}`)
	receivertest.WantReplayed(t, e.Do(e.NewRequest("k", "{}", receivertest.SentTo("shop-eu"))), http.StatusCreated, "")
}

// One receiver that two destinations lead to, such as a URL and a stream, names both: an event that comes from both counts once.
func TestTwoDestinationsOfOneReceiver(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{Destinations: []string{"web", "stream"}}, receivertest.Effect)
		for key, ways := range map[string][2]string{"a": {"web", "stream"}, "b": {"stream", "web"}} {
			receivertest.WantFirst(t, e.Do(e.NewRequest(key, "{}", receivertest.SentTo(ways[0]))), http.StatusCreated, `{"done":"`+key+`"}`)
			receivertest.WantReplayed(t, e.Do(e.NewRequest(key, "{}", receivertest.SentTo(ways[1]))), http.StatusCreated, "")
			receivertest.WantProblem(t, e.Do(e.NewRequest(key, "[]", receivertest.SentTo(ways[1]))), http.StatusUnprocessableEntity, "key-reused")
			e.WantRows(key, 1, 1)
		}
	})
}
