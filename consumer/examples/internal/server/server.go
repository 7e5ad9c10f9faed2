// Package server serves an example's handler until the program is to stop.
package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Main runs an example until it fails, or until the program gets SIGINT or SIGTERM, which end ctx.
// It returns the program's exit code.
func Main(run func(ctx context.Context) error) (code int) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		slog.Error("the receiver has ended", "error", err)
		return 1
	}
	return 0
}

// Run serves handler at LISTEN, by default 127.0.0.1:8080, until ctx ends, and then lets the
// requests that it has taken come to their end: a relay whose request is cut off sends it again,
// but one that is finished need not be.
func Run(ctx context.Context, handler http.Handler) error {
	address := os.Getenv("LISTEN")
	if address == "" {
		address = "127.0.0.1:8080"
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	slog.Info("listening", "address", listener.Addr().String())

	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	if err := server.Shutdown(stopping); err != nil {
		return err
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
