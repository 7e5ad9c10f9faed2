package config

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// An Outbox is one entry of the list databases: a schema with the outbox tables that run serves
// beside the others.
type Outbox struct {
	Name   string
	Schema string
	Pool   *pgxpool.Config

	url settings.Secret
}

// outboxEntry is an entry as it is written.
type outboxEntry struct {
	Outbox
	urlFile string
}

func outboxRows(o *outboxEntry) []settings.Row {
	return []settings.Row{
		{Path: "name", Value: settings.One("billing", parseOutboxName, settings.To(&o.Name))},
		{Path: "url", Value: settings.Showing(settings.One("${BILLING_DATABASE_URL}", settings.ParseSecret, settings.To(&o.url)), databasePart)},
		{Path: "url_file", Value: settings.One("/var/run/secrets/billing/url", settings.ParseText, settings.To(&o.urlFile))},
		{Path: "schema", Value: settings.One("billing", optional(parseSchema), settings.To(&o.Schema))},
	}
}

var outboxName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

func parseOutboxName(text string) (string, string) {
	if !outboxName.MatchString(text) {
		return "", settings.Quote(text) + " is not usable; write lower-case letters, digits, '-' and '_', starting with a letter or digit, at most 63"
	}
	return text, ""
}

// bindOutboxes reads the list databases. Without an entry it does nothing.
func (c *Config) bindOutboxes() {
	paths := c.Children("databases")
	if len(paths) == 0 {
		if c.Given("databases") && !c.Failed("databases") {
			c.ProblemAt("databases", `is an empty list; write entries such as {name: billing, url: "${BILLING_DATABASE_URL}"}, or remove it and set database.url`)
		}
		return
	}
	for _, single := range []string{"database.url", "database.listen_url", "database.schema"} {
		if c.Given(single) {
			c.ProblemAt(single, "is set, and so is databases; remove one of them")
		}
	}
	names, places := map[string]string{}, map[string]string{}
	for _, path := range paths {
		entry := c.outboxAt(path)
		if entry.Name == "" && !c.Failed(path+".name") && !c.Failed(path) {
			c.ProblemAt(path+".name", "is not set; write a name such as billing, which logs, metrics and --database use")
		}
		if first := names[entry.Name]; entry.Name != "" && first != "" {
			c.ProblemAt(path+".name", settings.Quote(entry.Name)+" is the name of "+first+", too; names are unique")
		}
		names[entry.Name] = path
		if entry.Pool == nil || c.Failed(path+".schema") {
			continue
		}
		place := placeOf(entry)
		if first := places[place]; first != "" {
			c.ProblemAt(path, "is the same database and schema as "+first+"; each event would be claimed by both; remove one of them")
		} else {
			places[place] = path
		}
		c.Outboxes = append(c.Outboxes, entry)
	}
}

// placeOf identifies the schema of an outbox, whatever the login.
func placeOf(o Outbox) string {
	conn := o.Pool.ConnConfig
	return strings.Join([]string{strings.ToLower(hostPort(conn.Host, conn.Port)), conn.Database, cmp.Or(o.Schema, conn.RuntimeParams["search_path"])}, "\x00")
}

// outboxAt reads one entry. Its pool is nil if it has no usable URL, which is reported.
func (c *Config) outboxAt(path string) Outbox {
	var entry outboxEntry
	c.Bind(path, outboxRows(&entry))
	at := path + ".url"
	switch {
	case c.Failed(path) || c.Failed(at) || c.Failed(path+".url_file"):
		return entry.Outbox
	case entry.url != "" && entry.urlFile != "":
		c.ProblemAt(path+".url_file", "is set beside url; remove one of them")
		return entry.Outbox
	case entry.urlFile != "":
		at = path + ".url_file"
		if content := c.followSecret(at, entry.urlFile, settings.ParseSecret, func(url string) string { return url }); content != nil {
			entry.url = settings.Secret(content())
		}
	case entry.url == "":
		c.ProblemAt(at, "is not set; set url or url_file")
	}
	entry.Pool = c.parsedURL(at, entry.url)
	return entry.Outbox
}

// choose makes one entry of databases the database of a command: the one that --database names, or
// the only one. Where several remain, it is a mistake unless the command serves all of them.
func (c *Config) choose(name string, given, all bool) {
	var names []string
	for _, o := range c.Outboxes {
		names = append(names, o.Name)
	}
	known := strings.Join(names, ", ")
	switch i := slices.Index(names, name); {
	case given && len(c.Children("databases")) == 0:
		c.Problem(settings.Flag("database"), "databases", "names an entry of databases, and the configuration has none")
	case given && i < 0:
		c.Problem(settings.Flag("database"), "databases", "%s is not configured; the names are %s", settings.Quote(name), known)
	case given:
		c.use(c.Outboxes[i])
	case len(c.Outboxes) == 1 && len(c.Children("databases")) == 1:
		c.use(c.Outboxes[0])
	case len(c.Outboxes) > 1 && !all:
		c.ProblemAt("databases", "has several entries; choose one with --database NAME: "+known)
	}
}

// use makes an outbox the only database of this configuration.
func (c *Config) use(o Outbox) {
	c.Pool, c.databaseURL, c.Relay.Pool, c.Relay.Schema, c.Outboxes = o.Pool, o.url, o.Pool, o.Schema, nil
}

// With returns a copy of the configuration for one of its outboxes.
func (c *Config) With(o Outbox) *Config {
	one := *c
	one.use(o)
	return &one
}

// LoadAll is [Load] for a command that serves all entries of databases. If there are several and
// --database chooses none, Pool is nil and Outboxes holds them; otherwise Outboxes is nil.
func LoadAll(inv *cli.Invocation, sections ...string) *Config {
	return loadFrom(sourcesOf(inv, true), sections...)
}

// withDatabases adds databases to sections with database: the list stands in its place.
func withDatabases(sections []string) []string {
	if slices.Contains(sections, "database") {
		return append(slices.Clone(sections), "databases")
	}
	return sections
}
