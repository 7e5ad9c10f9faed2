package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	guarded "github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/procstat"
)

// A rig is what all measurements of a run share: the server, the receiver, and a directory for
// files.
type rig struct {
	addresses

	options    options
	dir        string
	server     *localpg.Server
	postmaster int
	receiver   *process
	databases  int
	kept       map[string]*database // those that are filled once, by what they hold
	links      []*link
}

// slowAnswer is how long the slow destination takes.
const slowAnswer = 2 * time.Second

func newRig(ctx context.Context, o options) (r *rig, err error) {
	guarded.ClearEnvironment()
	r = &rig{options: o, kept: map[string]*database{}}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if r.options.relay, err = filepath.Abs(o.relay); err != nil {
		return r, fmt.Errorf("find outbox-relay: %w", err)
	}
	if _, err := os.Stat(r.options.relay); err != nil {
		return r, fmt.Errorf("find outbox-relay: %w; run make build first", err)
	}
	if r.dir, err = os.MkdirTemp("", "outbox-relay-bench-"); err != nil {
		return r, fmt.Errorf("make a directory: %w", err)
	}
	r.server, err = localpg.Start(ctx, localpg.Options{ListenTCP: true, Durable: true, Settings: map[string]string{
		// No checkpoint falls into a measurement: it would belong to whichever system runs then.
		"max_wal_size": "8GB", "checkpoint_timeout": "1h", "shared_buffers": "512MB", "max_connections": "400",
	}})
	if err != nil {
		return r, err
	}
	pidFile, err := os.ReadFile(filepath.Join(r.server.Dir(), "data", "postmaster.pid"))
	if err != nil {
		return r, fmt.Errorf("find PostgreSQL's process: %w", err)
	}
	first, _, _ := strings.Cut(string(pidFile), "\n")
	if r.postmaster, err = strconv.Atoi(first); err != nil {
		return r, fmt.Errorf("find PostgreSQL's process: %w", err)
	}
	if r.receiver, err = startRole(ctx, nil, "receiver"); err != nil {
		return r, err
	}
	return r, r.receiver.Call("addresses", nil, &r.addresses)
}

func (r *rig) close() {
	for _, l := range r.links {
		l.close()
	}
	for _, db := range r.kept {
		db.pool.Close()
	}
	var failures []error
	if r.receiver != nil {
		failures = append(failures, r.receiver.Stop())
	}
	if r.server != nil {
		failures = append(failures, r.server.Stop())
	}
	if r.dir != "" {
		failures = append(failures, os.RemoveAll(r.dir))
	}
	if err := errors.Join(failures...); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
}

// url returns the beginning of the URLs of a load's destinations.
func (r *rig) url(wire string, delay time.Duration) string {
	path := "/" + strconv.FormatInt(delay.Microseconds(), 10) + "/"
	switch wire {
	case "tls":
		return "https://" + r.TLS + path
	case "h2":
		return "https://" + r.HTTP2 + path
	}
	return "http://" + r.HTTP + path
}

// describe says on what a run was made.
func (r *rig) describe(ctx context.Context) string {
	model := "unknown processor"
	if info, err := os.Open("/proc/cpuinfo"); err == nil {
		defer info.Close()
		for lines := bufio.NewScanner(info); lines.Scan(); {
			if name, value, _ := strings.Cut(lines.Text(), ":"); strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	version := "outbox-relay"
	if out, err := exec.CommandContext(ctx, r.options.relay, "version").Output(); err == nil {
		version, _, _ = strings.Cut(string(out), ",")
	}
	postgres := "PostgreSQL"
	if out, err := exec.CommandContext(ctx, filepath.Join(r.server.BinDir(), "postgres"), "--version").Output(); err == nil {
		fields := strings.Fields(string(out))
		postgres = "PostgreSQL " + fields[min(2, len(fields)-1)]
	}
	return fmt.Sprintf("Measured with %s, %s with fsync, River %s, %s, %s/%s, %d processors (%s), %s.", strings.TrimSpace(version), postgres, riverVersion(),
		runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), model, time.Now().UTC().Format("2006-01-02"))
}

// A database is one of the server, for one system and one measurement.
type database struct {
	name       string
	dsn        string
	generation string // begins the keys of one fill, so that a database can be filled again
	pool       *pgxpool.Pool
}

// fresh makes an empty database.
func (r *rig) fresh(ctx context.Context) (*database, error) {
	r.databases++
	db := &database{name: fmt.Sprintf("bench_%d", r.databases), generation: fmt.Sprintf("%d-", r.databases)}
	if err := r.server.CreateDatabase(ctx, db.name, ""); err != nil {
		return nil, err
	}
	db.dsn = r.server.DSN(db.name)
	var err error
	if db.pool, err = pgxpool.New(ctx, db.dsn); err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	return db, nil
}

// drop removes a database, also when the run was interrupted.
func (r *rig) drop(ctx context.Context, db *database) error {
	db.pool.Close()
	return r.server.DropDatabase(context.WithoutCancel(ctx), db.name)
}

func (db *database) exec(ctx context.Context, sql string, args ...any) error {
	if _, err := db.pool.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("%.60s: %w", strings.TrimSpace(sql), err)
	}
	return nil
}

// inTransaction runs a setting, and a statement with its arguments.
func (db *database) inTransaction(ctx context.Context, setting, sql string, args ...any) error {
	return pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, setting); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, sql, args...)
		return err
	})
}

// waitUntil asks every 20 ms until a query answers want.
func (db *database) waitUntil(ctx context.Context, query string, want bool, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var is bool
		if err := db.pool.QueryRow(ctx, query).Scan(&is); err != nil {
			return fmt.Errorf("%s: %w", query, err)
		}
		if is == want {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", query, ctx.Err())
		}
	}
}

// A usage is what was used within a time.
type usage struct {
	window   time.Duration
	server   time.Duration // processor time of PostgreSQL
	process  time.Duration // of the measured processes
	walBytes int64
}

const walPosition = `SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint`

// during returns what is used while something is done. The processes may be started meanwhile. db
// may be nil: then nothing is read of PostgreSQL.
func (r *rig) during(ctx context.Context, db *database, processes *[]*process, do func() error) (used usage, err error) {
	read := func() (u usage, err error) {
		for _, p := range *processes {
			u.process += procstat.Process(p.pid)
		}
		if db == nil {
			return u, nil
		}
		if err := db.pool.QueryRow(ctx, walPosition).Scan(&u.walBytes); err != nil {
			return u, fmt.Errorf("read WAL position: %w", err)
		}
		u.server = procstat.Family(r.postmaster)
		return u, nil
	}
	before, err := read()
	begun := time.Now()
	if err == nil {
		err = do()
	}
	if err != nil {
		return used, err
	}
	window := time.Since(begun)
	after, err := read()
	return usage{window, after.server - before.server, after.process - before.process, after.walBytes - before.walBytes}, err
}

// perEvent adds what PostgreSQL used for each of so many events.
func (u usage) perEvent(found sample, events float64) sample {
	found["server"] = float64(u.server.Microseconds()) / events
	found["wal"] = float64(u.walBytes) / events
	return found
}

// distantDSN returns a URL of a database behind a link that makes each round trip longer.
func (r *rig) distantDSN(ctx context.Context, db *database, roundTrip time.Duration) (string, error) {
	l, err := startLink(ctx, r.server.TCPAddr(), roundTrip)
	if err != nil {
		return "", err
	}
	r.links = append(r.links, l)
	host, port, err := net.SplitHostPort(l.addr())
	if err != nil {
		return "", err
	}
	query := url.Values{"host": {host}, "port": {port}, "sslmode": {"disable"}}
	return (&url.URL{Scheme: "postgres", User: url.User("postgres"), Path: "/" + db.name, RawQuery: query.Encode()}).String(), nil
}
