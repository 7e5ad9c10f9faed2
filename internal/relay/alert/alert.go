package alert

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
)

// Defaults of the fields below.
const (
	DefaultAfter             = 45 * time.Second
	DefaultRepeat            = time.Hour
	DefaultLagOver           = 10 * time.Minute
	DefaultVacuumBlockedOver = 5 * time.Minute
)

// PausedOver is for how long a destination is paused before it counts as forgotten: longer than
// most maintenance takes.
const PausedOver = 4 * time.Hour

// Config says whom to tell of what, and when. Every alert also stands in the log.
type Config struct {
	// Channels that each alert is sent to. None: only the log tells.
	Channels []Channel
	// After is how long a condition must last before it is sent, unless its rule is in AfterByRule
	// or has its own default: RuleFailed 5 s, RuleRelaysDiffer and RuleRoutesChanged 5 min,
	// and 0 for what no time heals (RuleBlockedKeys, RuleReloadRefused, RuleQuarantined) or took
	// minutes to measure. 0: 45 s.
	After time.Duration
	// AfterByRule replaces After for single rules. 0: at once. Nil: none.
	AfterByRule map[string]time.Duration
	// Repeat is after which time an alert that lasts is sent again, and after a quarter of which if
	// it is twice as bad. 0: 1 h; negative: never.
	Repeat time.Duration
	// LagOver is how long a due delivery may wait before an alert, while no breaker or pause holds
	// it: RuleLag, or RuleWaitingKeys if an earlier delivery of its ordering key that is not due
	// holds it up; and how long a destination may accept nothing before RuleFailing. 0: 10 min.
	LagOver time.Duration
	// VacuumBlockedOver is for how long a session may keep the database from cleaning up. 0: 5 min.
	VacuumBlockedOver time.Duration
	// PublicURL is where people reach the page of the relay, such as https://relay.internal/outbox.
	// Empty: alerts have no link to it.
	PublicURL string
}

// WithDefaults returns a copy in which every zero value is replaced by its default.
func (a Config) WithDefaults() Config {
	a.After = cmp.Or(a.After, DefaultAfter)
	a.Repeat = cmp.Or(a.Repeat, DefaultRepeat)
	a.LagOver = cmp.Or(a.LagOver, DefaultLagOver)
	a.VacuumBlockedOver = cmp.Or(a.VacuumBlockedOver, DefaultVacuumBlockedOver)
	return a
}

// Policy returns what decides when alerts are sent.
func (a Config) Policy() Policy { return Policy{a.After, a.AfterByRule, a.Repeat} }

// Problems returns the mistakes in a Config with its defaults.
func (a Config) Problems(path string) []check.Problem {
	var v check.Problems
	v.Require(a.After > 0, path+".after", "%s is negative; write a duration such as 45s", a.After)
	for rule, after := range a.AfterByRule {
		v.Require(slices.Contains(Rules(), rule), path+".after_by_rule", "there is no rule %q; there are %s", rule, strings.Join(Rules(), ", "))
		v.Require(after >= 0, path+".after_by_rule", "%s is negative; write a duration such as 45s", after)
	}
	v.Require(a.Repeat < 0 || a.Repeat >= time.Minute, path+".repeat", "%s is too short; write a minute or more, such as 1h", a.Repeat)
	v.Require(a.LagOver > 0, path+".lag_over", "%s is negative; write a duration such as 10m", a.LagOver)
	v.Require(a.VacuumBlockedOver > 0, path+".vacuum_blocked_over", "%s is negative; write a duration such as 5m", a.VacuumBlockedOver)
	return v
}

// A Channel carries alerts to people. Notify may be called again with the same alert if it fails,
// and must respect ctx.
type Channel interface {
	// Name of the channel in logs and metrics; unique among the configured channels.
	Name() string
	// Notify sends one alert and returns nil once the other side has taken it.
	Notify(ctx context.Context, alert Alert) error
}
