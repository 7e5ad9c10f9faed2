package config

import "testing"

// A path tells destinations apart, and may hold a key.
func TestURLsAreShownWithoutSecrets(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]string{
		"https://logistics.internal/webhooks/v2/billing":                        "https://logistics.internal/webhooks/v2/billing",
		"https://user:word@crm.internal:8443/in?token=t":                        "https://crm.internal:8443/in?***",
		"https://hooks.slack.com/services/T024BE7LD/B1Q2W3E4R/aBcDeFgHiJkLmNoP": "https://hooks.slack.com/services/***/***/***",
		// Keys that look like words.
		"https://hooks.slack.com/services/TEAM/BOT/opensesame":      "https://hooks.slack.com/services/***/***/***",
		"https://discord.com/api/webhooks/42/swordfish":             "https://discord.com/api/***/***/***",
		"https://hooks.zapier.com/hooks/catch/12345/qwerty":         "https://hooks.zapier.com/hooks/***/***/***",
		"https://ops.internal/hooks/hunter2":                        "https://ops.internal/hooks/***",
		"https://ops.internal/in/bqx3k9":                            "https://ops.internal/in/***",
		"https://ops.internal/in/qjzkvwxp":                          "https://ops.internal/in/***",
		"https://ops.internal/in/deadbeef":                          "https://ops.internal/in/***",
		"https://ops.internal/in/correct-horse-battery-staple":      "https://ops.internal/in/***",
		"https://ops.internal/api/v2/webhooks/finance/invoice-paid": "https://ops.internal/api/v2/webhooks/finance/invoice-paid",
		"https://ops.internal/":                                     "https://ops.internal/",
		"https://a.test/in/0b1c7a52-9d3e-4f60-8a71-2c3d4e5f6a7b":    "https://a.test/in/***",
		"https://a.test/correcthorsebatterystaple/x":                "https://a.test/***/x",
		"nats://broker:4222":                                        "nats://broker:4222",
		"::":                                                        "***",
	} {
		if got := WithoutSecrets(raw); got != want {
			t.Errorf("%s is shown as %s, want %s", raw, got, want)
		}
	}
}
