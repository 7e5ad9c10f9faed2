package post_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/mask"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// The canaries of the echo table. Each begins and ends with the same four letters, by which even a
// piece is found.
const (
	canaryCustom   = `zqxwCustom+/"<&>='%41 \u0041\n;jvkp`
	canaryToken    = "zqxwToken+abc/def==jvkp"
	canaryPassword = `zqxwPass"word&jvkp`
	canaryQuery    = "zqxwQuery0123456789jvkp"
	canaryEvent    = "zqxwEvent 0123456789 jvkp"
)

// echoes are the ways in which a receiver repeats a request.
func echoes() map[string]func(r *http.Request, dump string) (contentType, body string) {
	text := func(edit func(string) string) func(*http.Request, string) (string, string) {
		return func(_ *http.Request, dump string) (string, string) { return "text/plain", "debug page\n" + edit(dump) }
	}
	asJSON := func(v any) string {
		b, _ := json.Marshal(v)
		return string(b)
	}
	all := map[string]func(*http.Request, string) (string, string){
		"header":     text(func(s string) string { return s }),
		"upper-case": text(strings.ToUpper),
		"lower-case": text(strings.ToLower),
		"html":       text(func(s string) string { return "<pre>" + html.EscapeString(s) + "</pre>" }),
		"html-decimal": text(func(s string) string {
			return regexp.MustCompile(`[^a-zA-Z0-9 ]`).ReplaceAllStringFunc(s, func(c string) string { return fmt.Sprintf("&#%d;", c[0]) })
		}),
		"query":        text(url.QueryEscape),
		"path":         text(url.PathEscape),
		"lower-escape": text(func(s string) string { return strings.ToLower(url.QueryEscape(s)) }),
		"twice":        text(func(s string) string { return url.QueryEscape(url.QueryEscape(s)) }),
		"wrapped":      text(func(s string) string { return regexp.MustCompile(`.{11}`).ReplaceAllString(s, "$0\r\n ") }),
		"broken-lines": text(func(s string) string {
			return regexp.MustCompile(`.{7}`).ReplaceAllString(html.EscapeString(s), "$0<br/>")
		}),
		"json-dump":    text(func(s string) string { return asJSON(s) }),
		"json-in-json": text(func(s string) string { return asJSON(asJSON(s)) }),
		"json-in-html": text(func(s string) string { return html.EscapeString(asJSON(s)) }),
		"go-quoted":    text(func(s string) string { return fmt.Sprintf("%q", s) }),
		"slashes":      text(func(s string) string { return strings.ReplaceAll(asJSON(s), "/", `\/`) }),
		"json": func(r *http.Request, _ string) (string, string) {
			return "application/json", "debug page " + asJSON(map[string]any{"headers": r.Header, "url": r.URL.String()})
		},
		"problem": func(_ *http.Request, dump string) (string, string) {
			return "application/problem+json; charset=utf-8", asJSON(map[string]string{"title": "debug page", "detail": dump})
		},
		"problem-broken": func(_ *http.Request, dump string) (string, string) {
			return "application/problem+json", `{"detail": "` + dump
		},
		"decoded": func(r *http.Request, _ string) (string, string) {
			user, password, _ := r.BasicAuth()
			return "text/plain", fmt.Sprintf("debug page: %s:%s is not welcome, password %q, signing secret %s", user, password, password, testSecret)
		},
		"shortened": func(r *http.Request, _ string) (string, string) {
			var lines []string
			for name := range r.Header {
				value := r.Header.Get(name)
				lines = append(lines, name+": "+value[:min(len(value), 14)]+"…")
			}
			return "text/plain", "debug page " + strings.Join(lines, "\n")
		},
		"gzip": func(_ *http.Request, dump string) (string, string) {
			var b bytes.Buffer
			w, _ := gzip.NewWriterLevel(&b, gzip.NoCompression)
			_, _ = w.Write([]byte(dump))
			_ = w.Close()
			return "text/html", b.String()
		},
	}
	for back := range 30 { // each canary is cut at each of its bytes: by what is kept of an excerpt, and by a connection that breaks
		secrets := func(r *http.Request) string { return r.Header.Get("Authorization")[7:] + r.Header.Get("X-Custom") }
		all[fmt.Sprintf("cut-%d", back)] = func(r *http.Request, _ string) (string, string) {
			return "text/plain", "debug page " + strings.Repeat(".", mask.MaxExcerpt-back-11) + secrets(r)
		}
		all[fmt.Sprintf("broken-%d", back)] = func(r *http.Request, _ string) (string, string) {
			return "text/plain", "debug page " + secrets(r)[:back]
		}
	}
	return all
}

// What a receiver repeats of a request's credentials, headers, query and signature is masked in
// what is kept of its answer, whatever it makes of them.
func TestEchoedSecretsAreMasked(t *testing.T) {
	t.Parallel()
	basic := base64.StdEncoding.EncodeToString([]byte("outbox:" + canaryPassword))
	canaries := []string{"zqxw", "jvkp", bare(basic)[:8], "mfkq9r8g"}
	message := order()
	message.Headers, _ = json.Marshal(map[string]string{"X-Event-A": canaryEvent})
	attempt := func(url, credential string) string {
		d := destinationOf(url+"?a=1&key="+canaryQuery, post.Wire{Excerpts: post.ExcerptsText, Authorization: func() string { return credential }}, post.Egress{})
		d.Headers, d.SigningSecrets = map[string]string{"X-Custom": canaryCustom}, []webhook.Secret{secret(t, testSecret)}
		return endpointOf(t, d).Deliver(t.Context(), message, nil).Message
	}
	check := func(name, kept string, canaries []string) {
		for _, form := range []string{bare(kept), bare(html.UnescapeString(kept)), bare(unescapedURL(kept)), bare(unescapedURL(unescapedURL(kept)))} {
			for _, canary := range canaries {
				if at := strings.Index(form, canary); at >= 0 {
					t.Errorf("%s holds %s: …%s", name, canary, form[max(0, at-80):min(len(form), at+80)])
				}
			}
		}
		if !strings.Contains(kept, "[masked]") && name != "gzip" && !strings.HasPrefix(name, "cut-") && !strings.HasPrefix(name, "broken-") {
			t.Errorf("%s: nothing was masked: %s", name, kept)
		}
	}
	for _, credential := range []string{"Basic " + basic, "Bearer " + canaryToken} {
		readable := 0
		for name, echo := range echoes() {
			rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
				dump, _ := httputil.DumpRequest(r.Request, false)
				contentType, body := echo(r.Request, string(dump))
				w.Header().Set("Content-Type", contentType)
				if strings.HasPrefix(name, "broken") {
					w.Header().Set("Content-Length", "1000")
				}
				if name == "gzip" {
					w.Header().Set("Content-Encoding", "gzip")
				}
				w.WriteHeader(http.StatusUnprocessableEntity)
				_, _ = w.Write([]byte(body))
			})
			kept := attempt(rc.URL+"/", credential)
			signatures := slices.Clone(canaries)
			for _, signature := range strings.Fields(rc.All()[0].Header.Get(webhook.Signature)) {
				signatures = append(signatures, bare(signature)[2:10])
			}
			check(name, kept, signatures)
			if strings.Contains(kept, "debug page") {
				readable++
			}
		}
		if readable < len(echoes())-6 {
			t.Errorf("%d texts are still readable", readable)
		}
		for name, answer := range map[string]string{"status-line": "HTTP/1.1 %s\r\n\r\n", "header-line": "HTTP/1.1 422 No\r\n%s\r\n\r\n"} {
			s := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) {
				if r, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
					_, _ = fmt.Fprintf(conn, answer, r.URL.RawQuery+" "+r.Header.Get("Authorization")+" "+r.Header.Get("X-Custom"))
				}
			})
			check(name, attempt(s.URL, credential), canaries)
		}
	}
}

// bare returns the letters and digits of a text, in lower case.
func bare(text string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return -1
	}, strings.ToLower(text))
}

// unescapedURL decodes what is an escape of a URL, and leaves the rest.
func unescapedURL(text string) string {
	return regexp.MustCompile(`%[0-9a-fA-F]{2}`).ReplaceAllStringFunc(text, func(s string) string {
		plain, _ := url.PathUnescape(s)
		return plain
	})
}

// What of a refusal's body is kept depends on the destination, and what is kept is bounded and fit
// to be shown.
func TestEvidenceIsKept(t *testing.T) {
	t.Parallel()
	const problem = "application/problem+json"
	every := []post.Excerpts{post.ExcerptsText, post.ExcerptsProblem, post.ExcerptsNone}
	for _, c := range []struct {
		contentType, body string
		text, problem     string // kept
	}{
		{"text/plain", "", "", ""},
		{"text/plain", "no such invoice", "no such invoice", ""},
		{"text/plain", "a\x00b\xff\x1b[31m\r\nc", "a\ufffdb\ufffd\ufffd[31m  c", ""},
		{"text/plain", strings.Repeat("x", 10_000), strings.Repeat("x", mask.MaxExcerpt-3) + "…", ""},
		{"application/json", `{"title": "No"}`, `{"title": "No"}`, ""},
		{
			problem, `{"type": "urn:x", "title": "Unknown invoice.", "detail": "There is no invoice 7.", "status": 422}`,
			"Unknown invoice: There is no invoice 7.", "Unknown invoice: There is no invoice 7.",
		},
		{
			problem, `{"type": "urn:outbox-relay:problem:signature-invalid", "title": "The signature is not valid", "detail": "None fits."}`,
			"The signature is not valid (signature-invalid): None fits.", "The signature is not valid (signature-invalid): None fits.",
		},
		{problem + "; charset=utf-8", `{"title": "Unknown invoice"}`, "Unknown invoice", "Unknown invoice"},
		{problem, `{"title": "Unprocessable Entity", "detail": "There is no invoice 7."}`, "There is no invoice 7.", "There is no invoice 7."},
		{problem, `{"title": "unprocessable-entity", "detail": "Unprocessable entity."}`, `{"title": "unprocessable-entity", "detail": "Unprocessable entity."}`, ""},
		{problem, `{"title": "no-stock", "detail": "No stock."}`, "no-stock", "no-stock"},
		{problem, `{"title": 7, "detail": "There is no invoice 7."}`, "There is no invoice 7.", "There is no invoice 7."},
		{problem, `{"title": "Cut`, `{"title": "Cut`, ""},
		{problem, `{"title": "` + strings.Repeat("x", 10_000) + `"}`, strings.Repeat("x", mask.MaxExcerpt-3) + "…", strings.Repeat("x", mask.MaxExcerpt-3) + "…"},
		{problem, `[]`, `[]`, ""},
	} {
		for _, policy := range every {
			rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
				w.Header().Set("Content-Type", c.contentType)
				w.WriteHeader(http.StatusUnprocessableEntity)
				_, _ = w.Write([]byte(c.body))
			})
			want := map[post.Excerpts]string{post.ExcerptsText: c.text, post.ExcerptsProblem: c.problem, post.ExcerptsNone: ""}[policy]
			if want != "" {
				want = ": " + want
			}
			v := exchangeWith(t, destinationOf(rc.URL, post.Wire{Excerpts: policy}, post.Egress{}))
			if v.Message != "422 Unprocessable Entity"+want {
				t.Errorf("%s of %.60q: %.100q, want %.100q", policy, c.body, v.Message, want)
			}
		}
	}
	if !slices.Contains(every, post.Destination{}.WithDefaults(post.Egress{}).Wire.Excerpts) || (post.Destination{}).WithDefaults(post.Egress{}).Wire.Excerpts != post.ExcerptsProblem {
		t.Error("only what was written for its reader is kept by default")
	}
}
