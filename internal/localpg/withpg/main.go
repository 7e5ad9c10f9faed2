// Command withpg runs a command beside a throwaway PostgreSQL and ends as the command does:
//
//	go run ./internal/localpg/withpg psql
//
// DATABASE_URL and the variables of libpq (PGHOST and so on) lead to an empty database, as its
// superuser; the programs of the server, such as psql and pg_dump, come first on PATH.
//
// With -data as the first argument no server runs. Instead, [localpg.DataVariable] names the data
// of a cluster with migrated templates, so that initdb and the migrations run once for all packages
// that go test runs:
//
//	go run ./internal/localpg/withpg -data go test ./...
//
// With -keep instead of a command it prints how to reach the server, for a shell, and keeps it
// until it is interrupted. That server is durable and listens on 127.0.0.1, where it wants the
// password that its URL has: other accounts of the machine get there, too.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

func main() {
	code, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "withpg:", err)
	}
	os.Exit(code)
}

func run(args []string) (code int, err error) {
	dataOnly := len(args) > 0 && args[0] == "-data"
	if dataOnly {
		args = args[1:]
	}
	if len(args) == 0 {
		return 2, errors.New("name a command to run")
	}
	// A terminal sends its interrupt to the command too, which decides what becomes of it.
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGHUP)
	defer stop()

	if args[0] == "-keep" {
		return keep(ctx, interrupts)
	}
	server, err := localpg.Start(ctx, localpg.Options{})
	if err != nil {
		return 1, err
	}
	defer func() {
		if stopErr := server.Stop(); stopErr != nil && err == nil {
			code, err = 1, stopErr
		}
	}()
	if dataOnly {
		if err := pgtest.Prepare(ctx, server); err != nil {
			return 1, err
		}
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), variables(server, dataOnly)...)
	err = cmd.Run()
	if exit := new(exec.ExitError); errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil // it has said why itself
	}
	if err != nil {
		return 1, fmt.Errorf("run %s: %w", args[0], err)
	}
	return 0, nil
}

// keep runs a server until it is interrupted.
func keep(ctx context.Context, interrupts <-chan os.Signal) (code int, err error) {
	password := strings.ToLower(rand.Text())
	server, err := localpg.Start(ctx, localpg.Options{ListenTCP: true, Durable: true, Password: password})
	if err != nil {
		return 1, err
	}
	dsn := url.URL{Scheme: "postgres", User: url.UserPassword("postgres", password), Host: server.TCPAddr(), Path: "/postgres", RawQuery: "sslmode=disable"}
	fmt.Fprintf(os.Stdout, "export OUTBOX_DATABASE_URL='%s'\n", &dsn)
	select {
	case <-interrupts:
	case <-ctx.Done():
	}
	if err := server.Stop(); err != nil {
		return 1, err
	}
	return 0, nil
}

func variables(server *localpg.Server, dataOnly bool) []string {
	if dataOnly {
		return []string{localpg.DataVariable + "=" + filepath.Join(server.Dir(), "data")}
	}
	return []string{
		"DATABASE_URL=" + server.DSN(""),
		"PGHOST=" + server.Dir(), "PGPORT=5432", "PGUSER=postgres", "PGDATABASE=postgres", "PGSSLMODE=disable",
		"PATH=" + server.BinDir() + string(os.PathListSeparator) + os.Getenv("PATH"),
	}
}
