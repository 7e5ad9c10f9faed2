package receivertest

import (
	"context"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/drill"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// drillPatience ends what would hang. No assertion depends on it.
const drillPatience = time.Minute

// Drill tries the receiver at an address with every check of the command drill. Its handler takes
// invoice.created, and inserts the invoice into shipments. retired is a secret that it must refuse.
func Drill(t testing.TB, address string, pool *pgxpool.Pool, retired string, secrets ...string) {
	t.Helper()
	to, err := url.Parse(address)
	pgtest.Must(t, err)
	cfg := drill.Config{
		URL: to, Dialer: new(net.Dialer), Destination: "logistics-1", Type: "invoice.created", Version: 1, Payload: `{"invoice":"{key}","total":"1.00"}`,
		Timeout: drillPatience, Tolerance: 5 * time.Minute, Settle: drillPatience, Patience: drillPatience, MaxBody: 1 << 20, Rate: 100, For: time.Second,
		Probe: func(ctx context.Context, key string) (n int, err error) {
			err = pool.QueryRow(ctx, "SELECT count(*) FROM shipments WHERE invoice = $1", key).Scan(&n)
			return n, err
		},
		Done: func(drill.Result) {},
	}
	cfg.Retired = append(cfg.Retired, Must(webhook.ParseSecret(retired)))
	for _, secret := range secrets {
		cfg.Secrets = append(cfg.Secrets, Must(webhook.ParseSecret(secret)))
	}
	report, err := drill.Run(t.Context(), cfg)
	pgtest.Must(t, err)
	for _, check := range report.Checks {
		if check.Outcome != drill.Passed && (check.Name != "each-secret" || len(secrets) > 1) {
			t.Errorf("%s: %s: %s", check.Name, check.Outcome, check.Found)
		}
	}
}
