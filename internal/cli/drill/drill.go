// Package drill is the command drill: it tries a receiver for tests as the real world does.
package drill

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/drill"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay"
)

// Command is the command drill.
type Command struct {
	config.FileFlag
	URL           string        `arg:"" help:"The receiver, such as https://logistics.staging.example.com/webhooks/finance."`
	Destination   string        `placeholder:"NAME" help:"Sign, authenticate and time out as for this destination of the configuration. Default: $$OUTBOX_SIGNING_SECRET, or its only one."`
	SecretFile    string        `placeholder:"FILE" help:"File with the secrets that the receiver accepts, separated by commas, instead of the configured ones."`
	RetiredFile   string        `name:"retired-secret-file" placeholder:"FILE" help:"File with secrets that the receiver must refuse."`
	Type          string        `default:"drill.created" placeholder:"TYPE" help:"Type of the events, one that the receiver handles. Default: drill.created."`
	EventVersion  int           `default:"1" placeholder:"1" help:"Version of the events' schema."`
	Payload       string        `default:"{\"drill\":\"{key}\"}" placeholder:"JSON" help:"Their payload, in which {key} becomes the event's key."`
	ProbeSQL      string        `name:"probe-sql" placeholder:"SELECT" help:"Counts the effects of the key $$1 in --probe-database, such as: SELECT count(*) FROM shipments WHERE invoice = $$1"`
	ProbeDatabase string        `env:"PROBE_DATABASE_URL" placeholder:"URL" help:"The receiver's database. Better set PROBE_DATABASE_URL: others see flags in the list of processes."`
	ProbeURL      string        `name:"probe-url" placeholder:"URL" help:"Answers GET with the number of effects of a key, which takes the place of {key}."`
	Staging       string        `placeholder:"WORD" help:"A word of the receiver's host that says that it is for tests, beside staging, test, localhost and others."`
	Only          []string      `placeholder:"CHECK" help:"Make only these checks, separated by commas."`
	Skip          []string      `placeholder:"CHECK" help:"Leave these checks out."`
	Strict        bool          `help:"Warnings are failures."`
	Settle        time.Duration `default:"10s" placeholder:"10s" help:"How long an effect may take after the answer."`
	Rate          int           `default:"200" placeholder:"200" help:"Events a second under load, up to 1000."`
	For           time.Duration `default:"3s" placeholder:"3s" help:"How long that lasts, up to 1m."`
	JSON          bool          `help:"Print JSON."`
	JUnit         string        `name:"junit" placeholder:"FILE" help:"Also write a report as JUnit has it, for CI."`
}

func (Command) Help() string {
	return `Sends what relays, networks and attackers send to a receiver, and says what it does wrong and what to do. It exits 6 if a check failed.
Let it try no receiver in production: it leaves about a thousand events behind, whose keys begin with drill-. It refuses a host whose name has no word
such as staging or test, unless the receiver answers OPTIONS with the header X-Outbox-Drill: allowed.

Without a probe it knows answers but no effects, and skips what only effects show. Let the probe count the effect itself, not the memory of keys:

  outbox-relay drill https://logistics.staging.example.com/webhooks/finance --secret-file secret --type invoice.created \
    --payload '{"invoice":"{key}","total":"1.00"}' --probe-sql 'SELECT count(*) FROM shipments WHERE invoice = $1' --junit drill.xml

What each check sends and wants: docs/drill.md.`
}

// Bounds of one drill.
const (
	maxRate  = 1000
	maxFor   = time.Minute
	maxTime  = 10 * time.Minute
	patience = 75 * time.Second // how long a receiver may wait for a request that does not continue; proxies wait for a minute
)

// What relays and their receivers promise each other.
const (
	tolerance = 5 * time.Minute
	maxBody   = 1 << 20
)

func (cmd Command) check() error {
	switch {
	case cmd.Rate < 1 || cmd.Rate > maxRate:
		return cli.Usagef("--rate: %d is out of range; write 1 to %d", cmd.Rate, maxRate)
	case cmd.For <= 0 || cmd.For > maxFor:
		return cli.Usagef("--for: %s is out of range; write up to %s", cmd.For, maxFor)
	case cmd.Settle <= 0:
		return cli.Usagef("--settle: %s is not more than zero", cmd.Settle)
	case cmd.ProbeSQL != "" && cmd.ProbeURL != "":
		return cli.Usagef("--probe-sql and --probe-url can't be used together")
	case cmd.ProbeSQL != "" && cmd.ProbeDatabase == "":
		return cli.Usagef("--probe-sql needs the receiver's database: set PROBE_DATABASE_URL, or --probe-database")
	}
	return nil
}

func (cmd Command) Run(inv *cli.Invocation) error {
	cmd.ProbeDatabase = cmp.Or(cmd.ProbeDatabase, inv.Getenv("PROBE_DATABASE_URL"))
	if err := cmd.check(); err != nil {
		return err
	}
	cfg, err := cmd.config(inv)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(inv.Ctx, maxTime, fmt.Errorf("the drill took longer than %s; leave checks out with --skip", maxTime))
	defer cancel()
	var end func()
	if cfg.Probe, end, err = cmd.probe(ctx, cfg); err != nil {
		return err
	}
	defer end()
	report, err := drill.Run(ctx, cfg)
	if errors.Is(err, drill.ErrProduction) || errors.Is(err, drill.ErrUnknownCheck) {
		return cli.ExitError{Code: cli.ExitUsage, Err: err}
	} else if err != nil {
		return err
	}
	failed := report.Count(drill.Failed)
	if cmd.Strict {
		failed += report.Count(drill.Warned)
	}
	if cmd.JUnit != "" {
		if err := writeJUnit(cmd.JUnit, report, failed, cmd.Strict); err != nil {
			return err
		}
	}
	if err := output.Show(inv.Stdout, cmd.JSON, report, printReport); err != nil {
		return err
	}
	if failed > 0 {
		return cli.Foundf("%s; the receiver is not ready for a relay", plain.Plural(failed, "check failed", "checks failed"))
	}
	return nil
}

// config returns what the flags and the configuration say.
func (cmd Command) config(inv *cli.Invocation) (cfg drill.Config, err error) {
	u, err := post.ParseURL(cmd.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return cfg, cli.Usagef("URL: write one such as https://logistics.staging.example.com/webhooks/finance")
	}
	d, egress, err := cmd.destination(inv)
	if err != nil {
		return cfg, err
	}
	secrets, err := secretsOf(cmd.SecretFile, "--secret-file", d.SigningSecrets)
	if err != nil {
		return cfg, err
	}
	retired, err := secretsOf(cmd.RetiredFile, "--retired-secret-file", nil)
	if err != nil {
		return cfg, err
	}
	if len(secrets) == 0 {
		return cfg, cli.Usagef("name the secrets that the receiver accepts, by OUTBOX_SIGNING_SECRET, --secret-file or --destination; what does not verify signatures needs no drill to be found wrong")
	}
	header := http.Header{"User-Agent": {"outbox-relay/" + inv.Version + " (drill)"}}
	for name, value := range d.Headers {
		header.Set(name, value)
	}
	if d.Wire.Authorization != nil {
		header.Set("Authorization", d.Wire.Authorization())
	}
	secured := &tls.Config{MinVersion: max(d.Wire.TLS.MinVersion, tls.VersionTLS12), ServerName: d.Wire.TLS.ServerName}
	if d.Wire.TLS.Roots != nil {
		secured.RootCAs = d.Wire.TLS.Roots()
	}
	if d.Wire.TLS.Certificate != nil {
		secured.Certificates = []tls.Certificate{*d.Wire.TLS.Certificate()}
	}
	return drill.Config{
		URL: u, Dialer: egress.Dialer(d.Timeout), TLS: secured, Header: header, Secrets: secrets, Retired: retired, StagingWord: cmd.Staging,
		Destination: d.Name, Type: cmd.Type, Version: cmd.EventVersion, Payload: cmd.Payload, Timeout: d.Timeout, Tolerance: tolerance, Settle: cmd.Settle,
		Patience: patience, MaxBody: maxBody, Rate: cmd.Rate, For: cmd.For, Only: cmd.Only, Skip: cmd.Skip,
		Done: func(r drill.Result) { fmt.Fprintf(inv.Stderr, "%-8s %s\n", r.Outcome, r.Name) },
	}, nil
}

// destination returns the configured destination as which the receiver is tried.
func (cmd Command) destination(inv *cli.Invocation) (d relay.Destination, egress relay.Egress, err error) {
	sections := []string{"destinations", "defaults", "egress"}
	names := config.Load(inv, sections...).Children("destinations")
	var given []webhook.Secret
	if cmd.Destination == "" && len(names) > 0 {
		if given, err = secretsInEnvironment(inv.Env); err != nil {
			return d, egress, err
		}
	}
	switch {
	case cmd.Destination != "":
	case len(names) == 0:
		inv.Flags["destination-url"] = cmd.URL // the one that the environment's secret is for
	case slices.Contains(names, environments) && len(given) > 0:
		cmd.Destination = environments
	case len(given) > 0 || len(names) > 1 && cmd.SecretFile != "": // none of those that are configured
		c, err := config.Read(inv, "egress")
		if err != nil {
			return d, egress, err
		}
		return relay.Destination{Name: environments, SigningSecrets: given}.WithDefaults(c.Relay.Egress), c.Relay.Egress, nil
	case len(names) > 1:
		return d, egress, cli.Usagef("name the secrets that the receiver accepts, by OUTBOX_SIGNING_SECRET or --secret-file, or the destination as which it is tried, by --destination: %s", strings.Join(names, ", "))
	}
	c, err := config.Read(inv, sections...)
	if err != nil {
		return d, egress, err
	}
	for _, d = range c.Relay.Destinations {
		if d.Name == cmd.Destination || cmd.Destination == "" {
			return d.WithDefaults(c.Relay.Egress), c.Relay.Egress, nil
		}
	}
	return d, egress, cli.Usagef("--destination: there is no destination %q; there is %s", cmd.Destination, strings.Join(names, ", "))
}

// environments is the name of the destination that OUTBOX_SIGNING_SECRET is for.
const environments = "default"

// secretsInEnvironment returns those of OUTBOX_SIGNING_SECRET, or of the file that
// OUTBOX_SIGNING_SECRET_FILE names. nil: there are none.
func secretsInEnvironment(env []string) (secrets []webhook.Secret, err error) {
	const variable = "OUTBOX_SIGNING_SECRET"
	for _, entry := range env {
		switch name, value, _ := strings.Cut(entry, "="); {
		case value == "":
		case name == variable:
			if secrets, err = webhook.ParseSecrets(value); err != nil {
				return nil, cli.Usagef("%s: %w", name, err)
			}
		case name == variable+"_FILE":
			if secrets, err = secretsOf(value, name, nil); err != nil {
				return nil, err
			}
		}
	}
	return secrets, nil
}

// secretsOf returns the secrets in a file, or others if no file is named.
func secretsOf(name, flag string, others []webhook.Secret) ([]webhook.Secret, error) {
	if name == "" {
		return others, nil
	}
	content, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	secrets, err := webhook.ParseSecrets(string(content))
	if err != nil {
		return nil, cli.Usagef("%s: %w", flag, err)
	}
	return secrets, nil
}

func printReport(w io.Writer, r drill.Report) error {
	for _, c := range r.Checks {
		if c.Outcome == drill.Failed || c.Outcome == drill.Warned {
			fmt.Fprintf(w, "%s: %s\n  sent:     %s\n  expected: %s\n  found:    %s\n  do:       %s\n            %s\n\n", strings.ToUpper(c.Outcome), c.Name, c.Sends, c.Expects, c.Found, c.Remedy, c.Link)
		}
	}
	if !r.Probed {
		fmt.Fprint(w, "Effects were not counted: without --probe-sql or --probe-url only answers are judged.\n")
	}
	notAsked, more := 0, ""
	for _, c := range r.Checks {
		if c.Found == drill.NotAsked {
			notAsked++
		}
	}
	if notAsked > 0 {
		more = fmt.Sprintf(", %d not asked for", notAsked)
	}
	_, err := fmt.Fprintf(w, "%d passed, %d failed, %d warned, %d skipped%s; %s in %.0f s, with keys that begin with %s\n", r.Count(drill.Passed), r.Count(drill.Failed),
		r.Count(drill.Warned), r.Count(drill.Skipped)-notAsked, more, plain.Plural(r.Requests, "request", "requests"), r.Seconds, r.KeyPrefix)
	return err
}
