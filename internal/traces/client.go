package traces

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v4"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// requestTimeout bounds one request to the collector.
const requestTimeout = 10 * time.Second

// maxAnswer bounds what is read of an answer, in bytes.
const maxAnswer = 64 << 10

// client sends batches by OTLP over HTTP, in protobuf. It implements the SDK's otlptrace.Client.
//
// Neither the guard of egress nor its proxy applies: no event and no receiver has a say in where
// the collector is, and its usual place is this host, which egress.allow_private may exclude.
// Redirects are not followed.
type client struct {
	cfg    *Config
	http   *http.Client
	header http.Header

	closing   context.Context // done by hurry: no batch is tried again
	hurry     context.CancelFunc
	lifetime  context.Context // done by abort: requests are cut off
	abort     context.CancelFunc
	firstWait time.Duration // before a second try
}

func newClient(cfg *Config) *client {
	c := &client{cfg: cfg, header: http.Header{}, firstWait: time.Second}
	c.http = &http.Client{
		Timeout:       requestTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: requestTimeout}).DialContext,
			TLSHandshakeTimeout: requestTimeout, IdleConnTimeout: time.Minute, MaxIdleConns: 1, ForceAttemptHTTP2: true,
		},
	}
	c.closing, c.hurry = context.WithCancel(context.Background())
	c.lifetime, c.abort = context.WithCancel(context.Background())
	for name, value := range cfg.Headers {
		c.header.Set(name, value)
	}
	c.header.Set("Content-Type", "application/x-protobuf")
	c.header.Set("User-Agent", "outbox-relay/"+cfg.Version)
	return c
}

// Start implements otlptrace.Client.
func (*client) Start(context.Context) error { return nil }

// Stop implements otlptrace.Client.
func (c *client) Stop(context.Context) error {
	c.http.CloseIdleConnections()
	return nil
}

// UploadTraces sends a batch. What may pass is tried again until ctx is done, or the client is
// closing.
func (c *client) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	// The message of the service, ExportTraceServiceRequest, is the same on the wire.
	body, err := proto.Marshal(&tracepb.TracesData{ResourceSpans: spans})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.lifetime, cancel)()
	waits := backoff.NewExponentialBackOff(backoff.WithInitialInterval(c.firstWait), backoff.WithMaxElapsedTime(0))
	for {
		err := c.send(ctx, body)
		var passing *passingError
		if !errors.As(err, &passing) {
			return err
		}
		timer := time.NewTimer(max(waits.NextBackOff(), passing.wait))
		select {
		case <-timer.C:
			continue
		case <-ctx.Done():
		case <-c.closing.Done():
		}
		timer.Stop()
		return err
	}
}

// A passingError is one that may not come again.
type passingError struct {
	err  error
	wait time.Duration // as the collector asks
}

func (e *passingError) Error() string { return e.err.Error() }
func (e *passingError) Unwrap() error { return e.err }

// A refusal is what a collector says of spans that it has dropped out of a batch.
type refusal struct{ spans int }

func (r refusal) Error() string { return fmt.Sprintf("it refused %d of the spans of a batch", r.spans) }

// refusedBy returns how many spans of a batch an error concerns; -1: all.
func refusedBy(err error) int {
	var r refusal
	switch {
	case err == nil:
		return 0
	case errors.As(err, &r):
		return r.spans
	}
	return -1
}

// send makes one request.
func (c *client) send(ctx context.Context, body []byte) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.cfg.Endpoint.String(), bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header = c.header.Clone()
	response, err := c.http.Do(request)
	if err != nil {
		return &passingError{err: err}
	}
	defer response.Body.Close()
	answer, _ := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	switch response.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		seconds, _ := strconv.Atoi(response.Header.Get("Retry-After"))
		return &passingError{fmt.Errorf("it answered %d", response.StatusCode), time.Duration(min(max(seconds, 0), 3600)) * time.Second}
	}
	if response.StatusCode < 200 || response.StatusCode > 299 {
		return fmt.Errorf("it answered %d", response.StatusCode)
	}
	if refused := rejectedSpans(answer); refused > 0 {
		return refusal{refused}
	}
	return nil
}

// rejectedSpans returns how many spans an ExportTraceServiceResponse says were refused: the first
// field of its first field. What is not such a message refuses none.
func rejectedSpans(answer []byte) int {
	number, kind, n := protowire.ConsumeTag(answer)
	if n < 0 || number != 1 || kind != protowire.BytesType {
		return 0
	}
	partial, m := protowire.ConsumeBytes(answer[n:])
	if m < 0 {
		return 0
	}
	if number, kind, n = protowire.ConsumeTag(partial); n < 0 || number != 1 || kind != protowire.VarintType {
		return 0
	}
	count, m := protowire.ConsumeVarint(partial[n:])
	if m < 0 || count > queueSize {
		return 0
	}
	return int(count)
}

// reason returns the text of an error for the log. What the HTTP client adds repeats the URL.
func reason(err error) string {
	if failed, ok := errors.AsType[*url.Error](err); ok {
		err = failed.Err
	}
	return err.Error()
}
