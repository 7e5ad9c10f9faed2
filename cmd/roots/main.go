// Command roots prints the certificate authorities of Mozilla as PEM. They come from a Go module
// whose version and hash are in go.sum, so that the image of a release and the image of the
// Dockerfile trust the same authorities, wherever they are built. It is its own module, so that
// the relay's does not require them.
package main

import (
	"bufio"
	"encoding/pem"
	"fmt"
	"os"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "roots:", err)
		os.Exit(1)
	}
}

// run includes authorities that are trusted only for certificates up to a date: PEM cannot express
// the limit, and Debian's bundle includes them too.
func run() error {
	out := bufio.NewWriter(os.Stdout)
	for root := range bundle.Roots() {
		if err := pem.Encode(out, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
			return err
		}
	}
	return out.Flush()
}
