package settings

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A certificate that ends soon is logged once a day.
func TestCertificateThatEndsSoonIsLoggedOnce(t *testing.T) {
	t.Parallel()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	testkit.Must(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC)}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	testkit.Must(t, err)
	key, err := x509.MarshalPKCS8PrivateKey(private)
	testkit.Must(t, err)
	var names []string
	for kind, content := range map[string][]byte{"CERTIFICATE": certificate, "PRIVATE KEY": key} {
		name := filepath.Join(t.TempDir(), kind)
		testkit.Must(t, os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content}), 0o600))
		names = append(names, name)
	}
	if strings.HasSuffix(names[0], "KEY") {
		names[0], names[1] = names[1], names[0]
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
