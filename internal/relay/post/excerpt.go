package post

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/mask"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Excerpts says what of the body of a refusal is kept: in last_error, the log of attempts, the
// relay's log and alerts. Whatever is kept, the request's headers, signatures and credentials are
// masked in it.
type Excerpts string

const (
	// ExcerptsProblem keeps the title and the detail of an application/problem+json answer, which
	// its writer meant to be read, and nothing of any other body.
	ExcerptsProblem Excerpts = "problem"
	// ExcerptsText keeps the beginning of any body. A debug page repeats the event's payload and
	// may hold what the receiver knows about its users.
	ExcerptsText Excerpts = "text"
	// ExcerptsNone keeps the status alone.
	ExcerptsNone Excerpts = "none"
)

// maxBody bounds what is read of a refusal's body, in bytes. It is more than is kept
// ([mask.MaxExcerpt]), so that a secret is found and masked before the text is cut.
const maxBody = 16 << 10

// excerptOf returns what to keep of a refusal's body, masked.
func excerptOf(resp *http.Response, policy Excerpts, m func() *mask.Mask) string {
	isProblem := webhook.HasType(resp.Header, "application/problem+json")
	encoding := resp.Header.Get("Content-Encoding")
	if policy == ExcerptsNone || policy != ExcerptsText && !isProblem || encoding != "" && !strings.EqualFold(encoding, "identity") {
		return "" // a secret cannot be found in a compressed body, which only a person with a tool would read
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	cut := err != nil || len(body) == maxBody
	text := string(body)
	if isProblem {
		sentence, ok := problemSentence(body, resp.StatusCode)
		if ok {
			text, cut = sentence, false
		} else if policy != ExcerptsText {
			return ""
		}
	}
	return plain.Shorten(m().Hide(text, cut), mask.MaxExcerpt)
}

// problemPrefix is what the types of the problems of this project's own receivers begin with.
const problemPrefix = "urn:outbox-relay:problem:"

// problemSentence returns the title and the detail of a problem (RFC 9457) as "title: detail", and
// whether there is any. The name of a problem of this project's own receivers, such as
// signature-invalid, stands behind the title: documents explain it.
func problemSentence(body []byte, status int) (sentence string, ok bool) {
	var problem struct {
		Type   string `json:"type"`
		Title  string `json:"title"`
		Detail string `json:"detail"`
	}
	var mistyped *json.UnmarshalTypeError // leaves the other member readable
	if err := json.Unmarshal(body, &problem); err != nil && !errors.As(err, &mistyped) {
		return "", false
	}
	title, detail := strings.Trim(problem.Title, " .:\n"), strings.TrimSpace(problem.Detail)
	if sameWords(title, http.StatusText(status)) { // as about:blank has it; the message begins with it already
		title = ""
	}
	if bare := strings.Trim(detail, " .:\n"); sameWords(bare, http.StatusText(status)) || sameWords(bare, title) {
		detail = ""
	}
	if name, own := strings.CutPrefix(problem.Type, problemPrefix); own && title != "" {
		title += " (" + name + ")"
	}
	if title == "" || detail == "" {
		return title + detail, title+detail != ""
	}
	return title + ": " + detail, true
}

// sameWords reports whether two texts are the same but for case and what joins their words: Not
// Found, not-found.
func sameWords(a, b string) bool {
	join := strings.NewReplacer("-", " ", "_", " ")
	return strings.EqualFold(join.Replace(a), join.Replace(b))
}

// malformations are what net/http says of an answer that is no HTTP, before it quotes it.
var malformations = []string{
	"malformed HTTP response", "malformed HTTP status code", "malformed HTTP version", "malformed MIME header", "malformed chunked encoding", "invalid byte in chunk length",
	"bad Content-Length", "multiple Content-Length", "unsupported transfer encoding", "too many transfer encodings", "header line too long", "headers exceeded",
	"server gave HTTP response to HTTPS client",
}

// describeMalformed says what is wrong with an answer that is no HTTP, and repeats nothing of it:
// that may be anything, such as the request.
func describeMalformed(err error) string {
	for _, known := range malformations {
		if strings.Contains(err.Error(), known) {
			return "the answer is no HTTP: " + known
		}
	}
	return "the answer is no HTTP"
}
