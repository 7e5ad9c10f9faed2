package config

import (
	"errors"
	"io/fs"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay"
)

// checkRelay reports what the relay itself refuses, but not what only follows from a mistake
// reported before.
func (c *Config) checkRelay() {
	problems := slices.DeleteFunc(c.Relay.Validate(), func(p relay.Problem) bool {
		return c.Failed(p.Path) ||
			p.Path == "destinations" && c.FailedBelow(p.Path) ||
			strings.HasPrefix(p.Path, "routes[") && len(c.Relay.Routes) == 0
	})
	for _, p := range problems {
		c.ProblemAt(p.Path, p.Text)
	}
}

// checkDatabase parses the database URLs.
func (c *Config) checkDatabase() {
	if !c.Failed("database.url") && !c.Has("database.url") && !c.Has("databases") {
		c.ProblemAt("database.url", "is not set; set OUTBOX_DATABASE_URL, or OUTBOX_DATABASE_URL_FILE")
	}
	c.Pool = c.parsedURL("database.url", c.databaseURL)
	c.Direct = c.parsedURL("database.listen_url", c.listenURL)
}

// parsedURL returns the database URL at path; nil: there is none, or it cannot be used.
func (c *Config) parsedURL(path string, url settings.Secret) *pgxpool.Config {
	if url == "" {
		return nil
	}
	pool, problem := ParseDatabaseURL(string(url))
	if problem != "" {
		c.ProblemAt(path, problem)
	}
	return pool
}

// refuseDefaultDestination refuses variables that set keys of the default destination while there
// is none: the secret would sign nothing, the credential would go nowhere, and the operator
// believes otherwise.
func (c *Config) refuseDefaultDestination(rows []settings.Row) {
	for _, r := range rows {
		if path := "destinations." + DefaultDestination + "." + r.Path; r.Make == nil && c.Own(path) {
			c.ProblemAt(path, `is only for the destination "default", and there is none; write `+r.Path+" for each destination that needs it")
		}
	}
}

// checkSchedules warns of delays that shrink: legal, and hardly ever meant.
func (c *Config) checkSchedules() {
	var shared destination
	c.Bind("defaults", policyRows(&shared))
	shared.Name = "defaults"
	for i, d := range append([]relay.Destination{shared.Destination}, c.Relay.Destinations...) {
		path := d.Name
		if i > 0 {
			path = "destinations." + path
		}
		if !slices.IsSorted(d.Retry.Schedule) {
			c.WarnAt(path+".retry.schedule", "has a delay that is shorter than the one before it")
		}
	}
}

const databaseExample = "write one such as postgres://user:password@localhost:5432/app"

// ParseDatabaseURL returns a pool configuration, or what is wrong with the URL. It never repeats
// any of it, nor what pgx says about it: where a URL is malformed, it is unknown where the password
// ends.
func ParseDatabaseURL(raw string) (*pgxpool.Config, string) {
	scheme, rest, isURL := strings.Cut(raw, "://")
	switch {
	case isURL && !strings.Contains(scheme, "=") && scheme != "postgres" && scheme != "postgresql":
		return nil, "begins with another scheme than postgres://; " + databaseExample
	case isURL && rest == "":
		return nil, "names no host; " + databaseExample
	case isURL && strayAt(rest):
		return nil, "has an @ after the host: write @ in user or password as %40, and / as %2F"
	case !isURL && !strings.Contains(raw, "="):
		return nil, "is neither a URL nor key=value pairs; " + databaseExample
	}
	pool, err := pgxpool.ParseConfig(raw)
	if err == nil && hasForeignKeyword(pool.ConnConfig.RuntimeParams) {
		return nil, "is a connection string of another driver; " + databaseExample
	}
	if err == nil {
		if params := pool.ConnConfig.RuntimeParams; params["application_name"] == "" {
			params["application_name"] = "outbox-relay"
		}
		return pool, ""
	}
	reason := err.Error()[strings.LastIndex(err.Error(), "`: ")+1:] // after the URL, which pgx repeats
	for _, known := range []struct{ sign, text string }{
		{"could not match", "has another number of ports than of hosts"},
		{"invalid port", "has a port that is not a number from 1 to 65535 (an IPv6 address needs [ ]; in a password write / as %2F and : as %3A)"},
		{"failed to parse as URL", "is not a valid URL; percent-encode what is special in user and password: % as %25, @ as %40, / as %2F"},
		{"failed to parse as keyword", "is not a list of key=value pairs; quote values with blanks: password='…'"},
		{"failed to read service", "names a service that cannot be read"},
		{"connect_timeout", "has a connect_timeout that is not a number of seconds"},
		{"target_session_attrs", "has an unknown target_session_attrs"},
		{"channel_binding", "has an unknown channel_binding"},
		{"require_auth", "has an invalid require_auth"},
		{"sslcertmode", "has an unknown sslcertmode"},
		{"protocol_version", "has an invalid protocol version"},
		{"failed to configure TLS", tlsProblem(err)},
		{"pool_", "has an invalid pool_… parameter"},
	} {
		if strings.Contains(reason, known.sign) {
			return nil, known.text
		}
	}
	return nil, "cannot be parsed; " + databaseExample
}

// hasForeignKeyword reports whether the run-time parameters hold a keyword of other drivers, as in
// "Host=h;Password=p". The relay would connect to this host instead, and send it the password as
// the value of a parameter.
func hasForeignKeyword(params map[string]string) bool {
	for name := range params {
		switch strings.ToLower(name) {
		case "database", "dbname", "host", "password", "port", "pwd", "server", "uid", "user", "username":
			return true
		}
	}
	return false
}

// strayAt reports an @ that ends up in the host or the name of the database, where a password's
// second half would be printed whenever the connection fails.
func strayAt(rest string) bool {
	if i := strings.IndexAny(rest, "@/"); i >= 0 && rest[i] == '@' {
		rest = rest[i+1:]
	}
	rest, _, _ = strings.Cut(rest, "?")
	return strings.Contains(rest, "@")
}

func tlsProblem(err error) string {
	const text = "has TLS settings that cannot be used; see sslmode, sslrootcert, sslcert and sslkey"
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		return text + " (cannot read " + settings.Quote(pathErr.Path) + ": " + pathErr.Err.Error() + ")"
	}
	return text
}

// Unsigned names the destinations whose requests are not signed.
func (c *Config) Unsigned() (names []string) {
	for _, d := range c.Relay.Destinations {
		if len(d.SigningSecrets) == 0 {
			names = append(names, d.Name)
		}
	}
	return names
}
