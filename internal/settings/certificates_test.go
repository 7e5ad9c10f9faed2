package settings

import (
	"bytes"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A certificate that ends soon is logged once a day.
func TestCertificateThatEndsSoonIsLoggedOnce(t *testing.T) {
	t.Parallel()
	certificate, key := localcert.PEM(localcert.Authority{}.Issue(func(c *x509.Certificate) { c.NotAfter = time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC) }))
	var names []string
	for _, content := range [][]byte{certificate, key} {
		name := filepath.Join(t.TempDir(), "pem")
		testkit.Must(t, os.WriteFile(name, content, 0o600))
		names = append(names, name)
	}
	var out bytes.Buffer
	log := zerolog.New(&out)
	k, err := WatchKeyPair(&log, names[0], names[1])
	testkit.Must(t, err)
	k.next = time.Time{}
	for range 3 {
		k.Get()
	}
	want := "tls.cert_file: the certificate in " + names[0] + " ends at 2020-01-02 03:04 UTC; replace it before, which needs no restart"
	if strings.Count(out.String(), want) != 1 {
		t.Errorf("logged: %s", out.String())
	}
}
