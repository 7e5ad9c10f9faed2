package elsewhere

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

// besideGo runs a receiver of package consumer on the same table, under the same name.
func besideGo(t *testing.T, r *receiver) {
	once := consumer.Middleware(pgtest.Pool(t, r.dsn), consumer.Config{Receiver: "shipping", Source: "finance", Secrets: []string{secret}})
	server := httptest.NewServer(once(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		body, err := io.ReadAll(request.Body)
		if err == nil {
			_, err = consumer.Tx(request.Context()).Exec(request.Context(),
				"INSERT INTO shipments SELECT invoice, total FROM json_to_record($1) AS p (invoice text, total numeric)", string(body))
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})))
	t.Cleanup(server.Close)

	var answers []<-chan answer
	for range 10 {
		answers = append(answers, r.begin(t, r.url, "k15", invoice("INV-15")), r.begin(t, server.URL, "k15", invoice("INV-15")))
	}
	wantOne(t, answers)
	r.wantRows(t, "k15", "INV-15", 1, 1)
	for _, urls := range [][]string{{r.url, server.URL}, {server.URL, r.url}} {
		key, body := "k15 held at "+urls[0], invoice("HOLD-15 at "+urls[0])
		release := r.hold(t)
		first := r.begin(t, urls[0], key, body)
		r.held(t)
		wantProblem(t, <-r.begin(t, urls[1], key, body), 409, "in-flight")
		release()
		wantFirst(t, <-first)
		wantDuplicate(t, <-r.begin(t, urls[1], key, body), 204)
		wantProblem(t, <-r.begin(t, urls[1], key, invoice("INV-15")), 422, "key-reused")
		r.wantRows(t, key, "HOLD-15 at "+urls[0], 1, 1)
	}
}
