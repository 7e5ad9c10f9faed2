package webhook

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func encode(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

func TestParseSecret(t *testing.T) {
	t.Parallel()
	of := func(n int) string { return "whsec_" + encode(bytes.Repeat([]byte("k"), n)) }
	cases := map[string]bool{
		of(24): true, of(32): true, of(64): true,
		of(23): false, of(65): false, of(0): false,
		"":                                       false,
		strings.TrimPrefix(of(32), "whsec"):      false,
		"whsec_" + of(32):                        false,
		of(32) + "\n":                            false,
		strings.ReplaceAll(of(32), "=", ""):      false,
		"whsec_" + strings.Repeat("_", 43) + "=": false,
		"whsec_not base64 but long enough":       false,
	}
	for text, ok := range cases {
		s, err := ParseSecret(text)
		if (err == nil) != ok || s.IsZero() == ok {
			t.Errorf("%q: %v, zero %v", text, err, s.IsZero())
		}
		if err != nil && len(text) > 10 && strings.Contains(err.Error(), text[6:]) {
			t.Errorf("the error repeats the secret: %v", err)
		}
	}
}

// A secret for a purpose is another one than the secret itself and those for other purposes, always
// the same, and as masked.
func TestSecretForAPurpose(t *testing.T) {
	t.Parallel()
	s, err := ParseSecret("whsec_" + encode(bytes.Repeat([]byte("k"), 32)))
	testkit.Must(t, err)
	// echo -n 'outbox-relay reconcile' | openssl dgst -sha256 -hmac
	// kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk
	const want = "b5f96771058a8c827417b80af99c41c20895c2f646934e7b7ab1e85958e41fad"
	derived := s.For(ReconcilePurpose)
	testkit.Equal(t, "got", fmt.Sprintf("%x", derived.Key()), want)
	if derived.Equal(s) || derived.Equal(s.For("another")) || !derived.Equal(s.For(ReconcilePurpose)) || fmt.Sprint(derived) != mask {
		t.Error("it is equal to another one, or is printed")
	}
	if !(Secret{}).For(ReconcilePurpose).IsZero() {
		t.Error("that of no secret is one")
	}
}

func TestParseSecrets(t *testing.T) {
	t.Parallel()
	for list, want := range map[string]int{"": 0, " ": 0, oldText: 1, oldText + " , " + newText: 2} {
		if got, err := ParseSecrets(list); len(got) != want || err != nil {
			t.Errorf("%q: %d secrets, %v", list, len(got), err)
		}
	}
	for _, list := range []string{oldText + ",", oldText + ",hunter2"} {
		_, err := ParseSecrets(list)
		if err == nil || !strings.Contains(err.Error(), "secret 2") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%v", err)
		}
	}
}

// A secret gets into a log by accident, never by intention: through %+v of a struct, JSON of a
// config, an slog attribute.
func TestSecretNeverPrintsItself(t *testing.T) {
	t.Parallel()
	const canary = "canary-canary-canary-canary"
	secret := mustParse(t, "whsec_"+encode([]byte(canary)))
	type config struct {
		Public  Secret
		private Secret
		List    []Secret
		Map     map[string]Secret
		Pointer *Secret
	}
	holder := config{secret, secret, []Secret{secret}, map[string]Secret{"k": secret}, &secret}
	var out bytes.Buffer
	for _, verb := range "vsdxXqTUbotgpc" {
		for _, flag := range []string{"", "+", "#", " ", "-20"} {
			fmt.Fprintf(&out, "%"+flag+string(verb)+"\n", secret)
			fmt.Fprintf(&out, "%"+flag+string(verb)+"\n", &secret)
			fmt.Fprintf(&out, "%"+flag+string(verb)+"\n", holder)
			fmt.Fprintf(&out, "%"+flag+string(verb)+"\n", &holder)
		}
	}
	testkit.Must(t, json.NewEncoder(&out).Encode(holder))
	for _, logger := range []*slog.Logger{slog.New(slog.NewTextHandler(&out, nil)), slog.New(slog.NewJSONHandler(&out, nil))} {
		logger.Info("secret", "value", secret, "pointer", &secret, "holder", holder, "list", holder.List)
	}
	for _, form := range []string{canary, encode([]byte(canary)), fmt.Sprintf("%x", canary), fmt.Sprintf("%X", canary), fmt.Sprint([]byte(canary))} {
		if strings.Contains(out.String(), strings.Trim(form, "[]")) {
			t.Errorf("the output holds %s", form)
		}
	}
	testkit.Equal(t, "printed as", fmt.Sprint(secret), "whsec_***")
}
