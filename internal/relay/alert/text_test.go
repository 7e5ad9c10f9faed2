package alert

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// No alert names an event that it does not know, counts one of many, or has a colon with nothing
// behind it, whatever of it is known.
func TestAlertTextsAreComplete(t *testing.T) {
	t.Parallel()
	defect := regexp.MustCompile(`event 0\b|\b1 (deliveries|attempts|events|keys|relays|sessions|rows)\b|\b1 (more hold|keys wait)\b|: *[.;:]|: *$|  |First\.|holds \.|""`)
	now := time.Now()
	for _, rule := range append(Rules(), RuleTest, "unknown_rule") {
		for _, count := range []int64{1, 2} {
			for _, event := range []int64{0, 7} {
				for _, err := range []string{"", "500 Internal Server Error"} {
					for _, detail := range []string{"", "1 delivery"} {
						for _, resolved := range []*time.Time{nil, &now} {
							a := Alert{
								Rule: rule, Subject: "shop", Count: count, OpenedAt: now.Add(-time.Hour), FirstEventID: event, FirstError: err, Detail: detail,
								ResolvedAt: resolved,
							}
							if found := defect.FindString(a.Text()); found != "" {
								t.Errorf("%q in: %s", found, a.Text())
							}
						}
					}
				}
			}
		}
	}
}

// A 410 pauses the destination: the alert says how to resume it, and its end what waits for that.
func TestFailuresOfAPausedDestination(t *testing.T) {
	t.Parallel()
	now := time.Now()
	a := Alert{Rule: RuleFailed, Subject: "shop", Count: 1, OpenedAt: now, FirstError: "410 Gone", Untried: UntriedPaused, Pending: 12}
	if text := a.Text(); !strings.Contains(text, "The destination is paused, and nothing is sent before it is resumed: outbox-relay resume shop. Until then") {
		t.Errorf("the alert says %q", text)
	}
	a.ResolvedAt = &now
	if text := a.Text(); !strings.Contains(text, "no failed delivery to \"shop\" is left, of 1 that failed; the destination is paused, with 12 pending. It lasted") {
		t.Errorf("its end says %q", text)
	}
	a.Untried = ""
	if text := a.Text(); !strings.Contains(text, "of 1 that failed. It lasted") {
		t.Errorf("its end says %q", text)
	}
}

func TestRulesAreAll(t *testing.T) {
	t.Parallel()
	file, err := os.ReadFile("rules.go")
	testkit.Must(t, err)
	alerted, _, _ := strings.Cut(string(file), "// Rules of advice alone")
	var named []string
	for _, match := range regexp.MustCompile(`(?m)^\tRule\w+ += "(\w+)"$`).FindAllStringSubmatch(alerted, -1) {
		named = append(named, match[1])
	}
	if rules := Rules(); len(named) == 0 || !slices.Equal(slices.Sorted(slices.Values(named)), slices.Sorted(slices.Values(rules))) {
		t.Errorf("Rules returns %q, named are %q", rules, named)
	}
}

// FuzzDefanged: whatever a text holds, what a chat gets of it neither mentions nor links.
func FuzzDefanged(f *testing.F) {
	for _, seed := range []string{"<!channel> <@U1>", "@everyone", "[a](https://evil.example)", "a@b.c", "evil.example", "@(.]x", "].(a"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		wantDefanged(t, defang(plain.Line(text)))
	})
}

// wantDefanged checks that no chat finds a mention, a link or a tag in a text.
func wantDefanged(t interface{ Fatalf(string, ...any) }, text string) {
	rest := strings.NewReplacer("[@]", "", "[.]", "").Replace(text)
	if strings.ContainsAny(rest, "@＠<>") || strings.Contains(text, "://") || strings.Contains(text, "](") {
		t.Fatalf("%q", text)
	}
	if host := regexp.MustCompile(`[^ .]\.\pL`).FindString(text); host != "" {
		t.Fatalf("%q in %q", host, text)
	}
}

// What reads like a mention or a link and is neither stays readable.
func TestDefangedTextIsReadable(t *testing.T) {
	t.Parallel()
	for give, want := range map[string]string{
		"422 Unprocessable Entity: 3.5s. Next":      "422 Unprocessable Entity: 3.5s. Next",
		"dial tcp 10.0.0.1:443: connection refused": "dial tcp 10.0.0.1:443: connection refused",
		"see https://evil.example/a?b=c":            "see https[:]//evil[.]example/a?b=c",
		"<!channel> <https://evil.example|click>":   "‹!channel› ‹https[:]//evil[.]example|click›",
		"@everyone ops@evil.example":                "[@]everyone ops[@]evil[.]example",
		"[click](tel:1) 例子。测试 a.b.c ...and so on":   "[click] (tel:1) 例子[.]测试 a[.]b[.]c ...and so on",
	} {
		if got := defang(give); got != want {
			t.Errorf("%s: %s, want %s", give, got, want)
		}
	}
}

// Every rule has a place in the runbook.
func TestEveryRuleHasARunbook(t *testing.T) {
	t.Parallel()
	runbook, err := os.ReadFile("../../../docs/operations.md")
	testkit.Must(t, err)
	for _, rule := range Rules() {
		if !strings.Contains(string(runbook), "\n## Alert: "+rule+"\n") {
			t.Errorf("the runbook has no heading for %s", rule)
		}
	}
}
