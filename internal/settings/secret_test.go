package settings

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/rs/zerolog"
	"go.yaml.in/yaml/v3"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestSecuritySecretIsMasked(t *testing.T) {
	t.Parallel()
	const text = "hunter2"
	s := struct{ S Secret }{text}
	var shown strings.Builder
	for _, verb := range "vsqxXdtbcoOeEfFgGU" {
		fmt.Fprintf(&shown, "%"+string(verb)+" ", s.S)
	}
	fmt.Fprintf(&shown, "%+v %#v %v ", s, s, &s)
	fmt.Fprint(&shown, s.S, []Secret{text}, map[string]Secret{"k": text}, map[Secret]int{text: 1})
	asJSON, err := json.Marshal(map[string]any{"k": s})
	testkit.Must(t, err)
	asYAML, err := yaml.Marshal(s)
	testkit.Must(t, err)
	shown.Write(asJSON)
	shown.Write(asYAML)
	log := zerolog.New(&shown)
	log.Info().Interface("s", s.S).Any("all", s).Msg("")

	for _, leak := range []string{text, fmt.Sprintf("%x", text), fmt.Sprintf("%X", text), fmt.Sprintf("%d", []byte(text)), fmt.Sprintf("%o", []byte(text)[0])} {
		if strings.Contains(shown.String(), leak) {
			t.Errorf("%q leaks in %s", leak, shown.String())
		}
	}
}
