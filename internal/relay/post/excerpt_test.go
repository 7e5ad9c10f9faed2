package post

import (
	"errors"
	"testing"
)

// What is no HTTP is not repeated: it may be the payload, sent back.
func TestMalformedAnswersAreNotRepeated(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`net/http: HTTP/1.x transport connection broken: malformed HTTP status code "secret"`: "the answer is no HTTP: malformed HTTP status code",
		"malformed MIME header line: secret":                                                  "the answer is no HTTP: malformed MIME header",
		"something new: secret":                                                               "the answer is no HTTP",
	} {
		if got := describeMalformed(errors.New(text)); got != want {
			t.Errorf("%s: %s", text, got)
		}
	}
}
