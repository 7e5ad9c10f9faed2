package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A peer is what a process that sends requests is given.
type peer struct {
	DSN       string        `json:"dsn"`
	URL       string        `json:"url"`
	Authority string        `json:"authority"` // PEM; empty: that of the system
	InFlight  int           `json:"inFlight"`
	Cooldown  time.Duration `json:"cooldown"` // of River; 0: its default
	Events    int           `json:"events"`   // of a bare loop
	Payload   int           `json:"payload"`
	Signed    bool          `json:"signed"`

	client *http.Client
	signer *webhook.Signer
}

// benchSecret signs the requests of all systems.
const benchSecret = "whsec_b3V0Ym94LXJlbGF5IGJlbmNobWFyayBzZWNyZXQ="

func (p *peer) parse(args []string) error {
	if len(args) != 1 {
		return errors.New("a role takes one argument, in JSON")
	}
	if err := json.Unmarshal([]byte(args[0]), p); err != nil {
		return err
	}
	return p.prepare()
}

func (p *peer) prepare() error {
	secret, err := webhook.ParseSecret(benchSecret)
	if err != nil {
		return err
	}
	p.signer = webhook.NewSigner(secret)
	transport := &http.Transport{MaxIdleConns: p.InFlight, MaxIdleConnsPerHost: p.InFlight, ForceAttemptHTTP2: true}
	if p.Authority != "" {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM([]byte(p.Authority))
		transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	p.client = &http.Client{Transport: transport, Timeout: 30 * time.Second}
	return nil
}

func (p *peer) close() {
	if p.client != nil {
		p.client.CloseIdleConnections()
	}
}

// An event is what one request is about.
type event struct {
	id          int64
	key         string
	destination int
	body        []byte
}

// post sends one event as outbox-relay would: the same headers, and the same signatures.
func (p *peer) post(ctx context.Context, e event) error {
	url := p.URL + destinationName(e.destination)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(e.body))
	if err != nil {
		return err
	}
	now := time.Now()
	id := strconv.FormatInt(e.id, 10)
	h := request.Header
	for _, field := range [...][2]string{
		{"Content-Type", "application/json"},
		{"User-Agent", "bench"},
		{webhook.IdempotencyKey, e.key},
		{webhook.EventType, eventType(e.destination)},
		{webhook.EventVersion, "1"},
		{webhook.EventID, id},
		{webhook.Attempt, "1"},
		{webhook.CreatedAt, "2026-01-01T00:00:00.000000Z"},
		{webhook.NotAfter, "2026-02-01T00:00:00.000000Z"},
		{webhook.DeliveryID, id + "-" + destinationName(e.destination) + "-1"},
		{webhook.Destination, destinationName(e.destination)},
	} {
		h[field[0]] = []string{field[1]}
	}
	if p.Signed {
		p.signer.SetHeaders(h, e.body, now)
	}
	response, err := p.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the receiver answered %s", response.Status)
	}
	return nil
}

func eventType(destination int) string       { return "t" + strconv.Itoa(destination) + ".made" }
func destinationName(destination int) string { return "d" + strconv.Itoa(destination) }

// playLoop sends the events without any database.
func playLoop(ctx context.Context, p *peer) error { return untilEnd(ctx, p.postAll) }

// postAll sends the events with so many requests at once as are allowed.
func (p *peer) postAll(ctx context.Context) error {
	if p.client == nil {
		if err := p.prepare(); err != nil {
			return err
		}
		defer p.close()
	}
	pad := padding(p.Payload)
	var next atomic.Int64
	var workers sync.WaitGroup
	failures := make(chan error, p.InFlight)
	for range p.InFlight {
		workers.Go(func() {
			for n := next.Add(1) - 1; n < int64(p.Events); n = next.Add(1) - 1 {
				key := "k-" + strconv.FormatInt(n, 10)
				if err := p.post(ctx, event{id: n, key: key, body: []byte(payloadText(int(n), pad))}); err != nil {
					failures <- err
					return
				}
			}
		})
	}
	workers.Wait()
	select {
	case err := <-failures:
		return err
	default:
		return nil
	}
}
