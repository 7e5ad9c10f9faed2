package elsewhere

import (
	"context"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/drill"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// drilled lets the command drill's checks try the receiver.
func drilled(t *testing.T, r *receiver) {
	address, err := url.Parse(r.url)
	pgtest.Must(t, err)
	secrets, err := webhook.ParseSecrets(oldSecret + "," + secret)
	pgtest.Must(t, err)
	other, err := webhook.ParseSecret(otherSecret)
	pgtest.Must(t, err)
	report, err := drill.Run(t.Context(), drill.Config{
		URL: address, Dialer: new(net.Dialer), Secrets: secrets, Retired: []webhook.Secret{other}, Destination: "logistics-1",
		Type: "invoice.created", Version: 1, Payload: `{"invoice":"{key}","total":"1.00"}`, Timeout: patience, Tolerance: 5 * time.Minute, Settle: patience,
		Patience: patience, MaxBody: 1 << 20, Rate: 100, For: time.Second, Done: func(drill.Result) {},
		Probe: func(ctx context.Context, key string) (n int, err error) {
			err = r.pool.QueryRow(ctx, "SELECT count(*) FROM shipments WHERE invoice = $1", key).Scan(&n)
			return n, err
		},
	})
	pgtest.Must(t, err)
	for _, check := range report.Checks {
		if check.Outcome != drill.Passed {
			t.Errorf("%s: %s: %s", check.Name, check.Outcome, check.Found)
		}
	}
}
