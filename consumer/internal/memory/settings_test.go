package memory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
)

type mute struct{}

func (mute) Error() string { panic("no text") }

func TestConfigRedactComesFirst(t *testing.T) {
	t.Parallel()
	s := &Settings{Redact: func(text string) string {
		return strings.ReplaceAll(text, "Ada", "password=secret") + "\n"
	}}
	if got := s.Redacted(errors.New("ship to Ada now")); got != "ship to password=*** now" {
		t.Errorf("got %q", got)
	}
	for name, s := range map[string]*Settings{
		"its own text":  {},
		"Config.Redact": {Redact: func(string) string { panic("no") }},
	} {
		if got := s.Redacted(mute{}); !strings.Contains(got, "panicked") {
			t.Errorf("%s: got %q", name, got)
		}
	}
	if got := (&Settings{}).Redacted(fmt.Errorf("wait: %w", context.Canceled)); got != "wait: context canceled" {
		t.Errorf("got %q", got)
	}
}
