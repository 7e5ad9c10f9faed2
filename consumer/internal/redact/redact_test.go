package redact

import (
	"fmt"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Everything here is made up, in the forms that errors of real libraries carry.
func TestText(t *testing.T) {
	t.Parallel()
	const jwt = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI0NzExIn0.c2lnbmF0dXJlLXNpZ25hdHVyZQ"
	const pem = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIBmade\nup==\n-----END EC PRIVATE KEY-----"
	cases := map[string]string{
		// One line, for a person's eyes.
		"first\nsecond\r\n\tthird\x00":            "first second   third",
		"\x1b[31;1mred\x1b[0m \x1b]0;title\a.":    "red .",
		"\x1b]8;;https://evil\x1b\\link\x1bcdone": "linkdone",
		"caf\xe9 \xf0\x9f":                        "caf\uFFFD \uFFFD",
		"a\u202egnp.exe\u200b\u2028b":             "agnp.exe b",
		"  blanks around ":                        "blanks around",

		// URLs
		"connect to postgres://billing:hunter2@db:5432/x?sslmode=disable: refused": "connect to postgres://***@db:5432/x?sslmode=disable: refused",
		"amqp://hunter2@mq":                        "amqp://***@mq",
		"redis://:hunter2@cache":                   "redis://***@cache",
		"postgres://u:hun/te@r2@db/x":              "postgres://***@db/x",
		"Post \"https://a/b?api_key=hunter2&n=1\"": "Post \"https://a/b?api_key=***",
		"GET /v1?sig=hunter2":                      "GET /v1?sig=***",

		// name and value
		"host=db password=hunter2 user=u":                 "host=db password=*** user=u",
		"host=db password = 'hunter2 \\' hunter2' user=u": "host=db password = '***' user=u",
		"password='hunter2 hunter2":                       "password='***'",
		"password=' secret='hunter2'":                     "password='***'",
		"PGPASSWORD=hunter2, next":                        "PGPASSWORD=*** next",
		"pwd:hunter2&hunter2":                             "pwd:***",
		"pass=hunter2":                                    "pass=***",
		"client_secret = hunter2":                         "client_secret = ***",
		"{\"password\":\"hun ter\\\"2\",\"user\":\"u\"}":  "{\"password\":\"***\",\"user\":\"u\"}",
		`got "{\"refresh_token\":\"hun ter2\",\"n\":1}"`:  `got "{\"refresh_token\":\"***\",\"n\":1}"`,
		"map[API-Key:hunter2 user:u]":                     "map[API-Key:*** user:u]",
		"pass\u200bword=hunter2":                          "password=***",
		"pass\x1b[0mword=hunter2":                         "password=***",

		// Headers
		"Authorization: Bearer hunter2 refused":           "Authorization: *** refused",
		"map[Authorization:[Basic dTpodW50ZXIy] X:[1]]":   "map[Authorization:*** X:[1]]",
		"Proxy-Authorization: hunter2":                    "Proxy-Authorization: ***",
		"Cookie: session=hunter2":                         "Cookie: ***",
		"with bearer hunter2: 401":                        "with bearer *** 401",
		"with Basic dTpodW50ZXIy: 401":                    "with Basic ***: 401",
		"password=Bearer hunter2":                         "password=*** ***",
		"the token whsec_b3V0Ym94LXJlbGF5LXRlc3Q= is old": "the token whsec_*** is old",

		// Known forms
		"key sk_live_51Hmadeup1234 and rk_test_51Hmadeup1234": "key *** and ***",
		"AKIAIOSFODNN7EXAMPLE is disabled":                    "*** is disabled",
		"ghp_0123456789abcdefghijABCDEFGHIJ012345":            "***",
		"post https://hooks.slack.com/services/T0/B0/hunter2": "post https://hooks.slack.com/***",
		"xoxb-1234567890-abcdefghij":                          "***",
		"bad session " + jwt + " here":                        "bad session *** here",
		"load key: " + pem + ": no":                           "load key: ***: no",
		"load key: " + pem[:40]:                               "load key: ***",
	}
	for _, text := range []string{ // what a person needs stays
		"",
		"insert shipment: duplicate key value violates unique constraint \"shipment_pkey\" (SQLSTATE 23505)",
		"password authentication failed for user \"billing\"",
		"basic authentication failed",
		"token: not found", "api_key: missing.", "Password: is wrong",
		"Get \"https://stock.internal:8443/a\"",
		"größe 漢字 €",
		"event 4711 of 1795274300123456 at 1795274300123 is unknown",
	} {
		cases[text] = text
	}
	for text, want := range cases {
		got := Text(text)
		if got != want {
			t.Errorf("%q\n got %q\nwant %q", text, got, want)
		}
		if again := Text(got); again != got {
			t.Errorf("%q\nthen %q", got, again)
		}
	}
}

func TestTextCutsWithoutDividingACharacter(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		strings.Repeat("a", 1025), strings.Repeat("ü", 1000), "a" + strings.Repeat("ü", 1000), strings.Repeat("漢", 342),
		strings.Repeat("\U0001F600 ", 5000),
	} {
		got := Text(text)
		if len(got) > maxRedactedBytes || len(got) < maxRedactedBytes-8 || !utf8.ValidString(got) || !strings.HasSuffix(got, "…") {
			t.Errorf("%d bytes: %q", len(got), got)
		}
	}
	if whole := strings.Repeat("a", 1024); Text(whole) != whole {
		t.Error("a text of just the limit is cut")
	}
	// A cut must not take away the part by which a credential is recognised.
	for n := range 64 {
		text := "-----BEGIN KEY-----" + strings.Repeat(" x", (maxScannedBytes-64+n)/2) + "-----END KEY----- postgres://u:hunter2" + strings.Repeat("2", 100) + "@db/x"
		if got := Text(text); strings.Contains(got, "hunter2") {
			t.Fatalf("%d: %q", n, got)
		}
	}
	testkit.Equal(t, "got", Text("postgres://u:hunter2"+strings.Repeat("2", 2*maxScannedBytes)+"@db"), masked)
}

// plantings are ways in which a credential gets into an error; %s is where.
var plantings = []string{
	"connect to postgres://u:%s@db:5432/x", "host=db password=%s user=u", "dial https://a/?token=%s&x=1", "Authorization: Bearer %s",
	"Authorization: Basic %s", "bearer %s", "{\"api_key\":\"%s\"}", "{\\\"secret\\\":\\\"%s\\\"}", "client-secret: '%s'", "whsec_%s",
	"-----BEGIN X-----\n%s\n-----END X-----", "eyJhbGciOiJIUzI1NiJ9.%s.x", "sk_live_%s",
}

// FuzzText plants a credential between any two texts and looks for it afterwards.
func FuzzText(f *testing.F) {
	const canary = "CANARY7canary7CANARY"
	f.Add("", "", 0)
	for i := range plantings {
		f.Add("insert order: ", " refused", i)
		f.Add("\x1b[31m ", "\x00", i)
	}
	f.Add("0\x1b", "0", 5)
	f.Add("password=", " 4111", 4)
	f.Add("'\"\\", "\\\"'", 6)
	f.Add(strings.Repeat("ü", 1<<10), strings.Repeat("token: not ", 1<<10), 0)
	f.Fuzz(func(t *testing.T, before, after string, planting int) {
		text := before + "\n" + fmt.Sprintf(plantings[uint(planting)%uint(len(plantings))], canary) + "\n" + after
		got := Text(text)
		if strings.Contains(got, canary) {
			t.Errorf("%q\nlet it through: %q", text, got)
		}
		if len(got) > maxRedactedBytes || !utf8.ValidString(got) || strings.ContainsFunc(got, unicode.IsControl) {
			t.Errorf("%q\nbecame %d bytes: %q", text, len(got), got)
		}
		if again := Text(got); again != got {
			t.Errorf("%q\nbecame %q\nthen %q", text, got, again)
		}
	})
}
