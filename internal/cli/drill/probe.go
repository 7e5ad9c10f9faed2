package drill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/drill"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// probes is how many connections a probe uses.
const probes = 4

// probe returns what counts effects, nil if nothing does, and what ends it.
func (cmd Command) probe(ctx context.Context, cfg drill.Config) (drill.Probe, func(), error) {
	switch {
	case cmd.ProbeSQL != "":
		parsed, problem := config.ParseDatabaseURL(cmd.ProbeDatabase)
		if problem != "" {
			return nil, nil, cli.Usagef("--probe-database: %s", problem)
		}
		parsed.MaxConns = probes
		parsed.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
		pool, err := pgxpool.NewWithConfig(ctx, parsed)
		if err != nil {
			return nil, nil, fmt.Errorf("open the probe's database: %w", err)
		}
		return func(ctx context.Context, key string) (n int, err error) {
			switch err = pool.QueryRow(ctx, cmd.ProbeSQL, key).Scan(&n); {
			case errors.As(err, new(*pgconn.ConnectError)):
				err = fmt.Errorf("connect to the probe's database: %w", err)
			case err != nil:
				err = cli.Usagef("--probe-sql: %w", err)
			}
			return n, err
		}, pool.Close, nil
	case cmd.ProbeURL != "":
		transport := &http.Transport{DialContext: cfg.Dialer.DialContext, TLSClientConfig: cfg.TLS, MaxIdleConnsPerHost: probes}
		return func(ctx context.Context, key string) (n int, err error) {
			if n, err = ask(ctx, transport, strings.ReplaceAll(cmd.ProbeURL, "{key}", url.QueryEscape(key))); err != nil {
				err = fmt.Errorf("--probe-url: %w", err)
			}
			return n, err
		}, transport.CloseIdleConnections, nil
	}
	return nil, func() {}, nil
}

// ask returns the number that a URL answers.
func ask(ctx context.Context, transport *http.Transport, address string) (int, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return 0, errors.New("it is no URL")
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode == http.StatusSwitchingProtocols { // its body has neither an end nor a limit of time
		return 0, fmt.Errorf("it answered %s, want 200 and a number", response.Status)
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<10))
	n, noNumber := strconv.Atoi(strings.TrimSpace(string(body)))
	if err != nil || response.StatusCode != http.StatusOK || noNumber != nil {
		return 0, fmt.Errorf("it answered %s and %s, want 200 and a number", response.Status, settings.Quote(string(body)))
	}
	return n, nil
}
