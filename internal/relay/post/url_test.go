package post

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestUsableURLs(t *testing.T) {
	t.Parallel()
	for _, u := range []string{
		"http://localhost", "http://localhost.:8080/", "https://logistics.internal/webhooks/finance", "https://a.b-c.example/x?y=z&k=%20",
		"http://127.0.0.1:65535/", "http://10.0.0.1", "http://[::1]:80/", "http://[::ffff:127.0.0.1]/", "http://[2a00:1450::1]/",
		"http://under_score.example/", "http://xn--nxasmq6b.example/", "http://1and1.example/", "http://1.example/", "HTTP://Example.COM/",
		"http://h/a b", "http://h/%7Bid%7D",
	} {
		if problem := urlProblem(u, Egress{}); problem != "" {
			t.Errorf("%s: %s", u, problem)
		}
	}
}

func TestSecurityUnusableURLs(t *testing.T) {
	t.Parallel()
	for u, want := range map[string]string{
		"":                                  "is empty",
		" ":                                 "scheme",
		"logistics":                         "scheme",
		"/webhooks":                         "scheme",
		"//logistics/webhooks":              "scheme",
		"ftp://logistics/":                  "scheme",
		"file:///etc/passwd":                "scheme",
		"unix:///var/run/x.sock":            "scheme",
		"javascript:alert(1)":               "scheme",
		"localhost:8080":                    "scheme",
		"http:":                             "no host",
		"http://":                           "no host",
		"http:///path":                      "no host",
		"http://:80/":                       "no host",
		"https:logistics":                   "no host",
		"http://user@host/":                 "user info",
		"http://user:pass@host/":            "user info",
		"http://@host/":                     "user info",
		"http://host/#part":                 "fragment",
		"http://host/#":                     "fragment",
		"http://host/{id}":                  "template",
		"http://host/{{.ID}}":               "template",
		"http://{host}/":                    "",
		"http://host:/":                     "colon but no port",
		"http://host:0/":                    "is out of range",
		"http://host:65536/":                "is out of range",
		"http://169.254.169.254/":           "never dialled",
		"http://[fe80::1]/":                 "never dialled",
		"http://0.0.0.0/":                   "never dialled",
		"http://host:99999999999999999/":    "is out of range",
		"http://host:-1/":                   "cannot be parsed",
		"http://host:http/":                 "cannot be parsed",
		"http://ho st/":                     "cannot be parsed",
		"http://host/\n":                    "cannot be parsed",
		"http://host/\x00":                  "cannot be parsed",
		"http://[::1":                       "cannot be parsed",
		"http://::1/":                       "",
		"http://[fe80::1%25eth0]/":          "zone",
		"http://[::1]extra/":                "cannot be parsed",
		"http://[127.0.0.1]/":               "",
		"http://127.1/":                     "neither a DNS name nor an IP address",
		"http://127.0.0.1./":                "neither a DNS name nor an IP address",
		"http://2130706433/":                "neither a DNS name nor an IP address",
		"http://0x7f000001/":                "neither a DNS name nor an IP address",
		"http://0X7F.1/":                    "neither a DNS name nor an IP address",
		"http://0177.0.0.1/":                "neither a DNS name nor an IP address",
		"http://127.0.0.256/":               "neither a DNS name nor an IP address",
		"http://host.0x/":                   "neither a DNS name nor an IP address",
		"http://①②⑦.0.0.1/":                 "neither a DNS name nor an IP address",
		"http://①⑥⑨.②⑤④.169.254/":           "neither a DNS name nor an IP address",
		"http://127。0。0。1/":                 "neither a DNS name nor an IP address",
		"http://bücher.example/":            "neither a DNS name nor an IP address",
		"http://-host/":                     "neither a DNS name nor an IP address",
		"http://host-/":                     "neither a DNS name nor an IP address",
		"http://a..b/":                      "neither a DNS name nor an IP address",
		"http://host,other/":                "neither a DNS name nor an IP address",
		"http://%31%32%37.0.0.1/":           "cannot be parsed",
		"http://" + strings.Repeat("a", 64): "neither a DNS name nor an IP address",
		"http://" + strings.Repeat("a.", 127) + "a":  "neither a DNS name nor an IP address",
		"http://host/" + strings.Repeat("x", 10_000): "has 10012 bytes",
	} {
		if got := urlProblem(u, Egress{}); got == "" || !strings.Contains(got, want) {
			t.Errorf("%.80q: %q, want %q", u, got, want)
		}
	}
}

// A URL that is wrong is often wrong because of the credentials in it, and problems are printed and
// logged.
func TestSecurityURLProblemsNeverEchoCredentials(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		user := rapid.SampledFrom([]string{"", "us3r", "us3r-t0ken", "US3R", "a%20us3r"}).Draw(t, "user")
		password := rapid.SampledFrom([]string{"s3cret", "4242424242", "s3c/ret", "s3c#ret", "s3c?ret", "s3 cret", "s3%cret", "s3cr@et", "[s3cret"}).Draw(t, "password")
		scheme := rapid.SampledFrom([]string{"", "http://", "https://", "http:", "//", "postgres://", "ht tp://", "h://"}).Draw(t, "scheme")
		host := rapid.SampledFrom([]string{"host", "host:0", "host:99999", "127.1", "[::1", "ho st", "{host}", ""}).Draw(t, "host")
		raw := scheme + user + ":" + password + "@" + host + "/path"
		problem := strings.ToLower(urlProblem(raw, Egress{}))
		for _, part := range []string{"us3r", "s3", "424242"} {
			if strings.Contains(problem, part) {
				t.Fatalf("%s: %s", raw, problem)
			}
		}
	})
}
