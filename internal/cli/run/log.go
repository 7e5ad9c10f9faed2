package run

import (
	"strings"

	"github.com/rs/zerolog"
)

// A foreignLog takes what libraries tell the standard logger: net/http that a receiver sent an
// answer without a request. It would stand between the lines of JSON as it is.
type foreignLog struct{ log zerolog.Logger }

func (f foreignLog) Write(line []byte) (int, error) {
	// net/http quotes what the receiver sent, which belongs into no log.
	text, _, _ := strings.Cut(strings.TrimSpace(string(line)), " starting with ")
	f.log.Warn().Str("from", "library").Msg(text)
	return len(line), nil
}
