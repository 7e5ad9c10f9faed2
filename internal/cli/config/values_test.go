package config

import "testing"

// A path tells destinations apart, and may hold a key.
func TestURLsAreShownWithoutSecrets(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]string{
		"https://logistics.internal/webhooks/v2/billing":                        "https://logistics.internal/webhooks/v2/billing",
		"https://user:word@crm.internal:8443/in?token=t":                        "https://crm.internal:8443/in?***",
		"https://hooks.slack.com/services/T024BE7LD/B1Q2W3E4R/aBcDeFgHiJkLmNoP": "https://hooks.slack.com/services/***/***/***",
		"https://a.test/in/0b1c7a52-9d3e-4f60-8a71-2c3d4e5f6a7b":                "https://a.test/in/***",
		"https://a.test/correcthorsebatterystaple/x":                            "https://a.test/***/x",
		"nats://broker:4222": "nats://broker:4222",
		"::":                 "***",
	} {
		if got := WithoutSecrets(raw); got != want {
			t.Errorf("%s is shown as %s, want %s", raw, got, want)
		}
	}
}
