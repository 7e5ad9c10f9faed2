package guard

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

const (
	adminToken = "admin-token-of-32-characters-0001"
	readToken  = "read-token-of-32-characters-00002"
)

func (c Config) answer(t *testing.T, r *http.Request) (*httptest.ResponseRecorder, Caller) {
	t.Helper()
	var caller Caller
	w := httptest.NewRecorder()
	c.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { caller = CallerOf(r.Context()) }),
		func(w http.ResponseWriter, _ *http.Request, status int, title, detail string) {
			http.Error(w, title+": "+detail, status)
		}).ServeHTTP(w, r)
	return w, caller
}

func TestHosts(t *testing.T) {
	t.Parallel()
	c := Config{Address: "127.0.0.1:9465", AllowedHosts: []string{"relay.internal"}}
	for host, status := range map[string]int{
		"localhost:9465": 200, "LOCALHOST": 200, "127.0.0.1:9465": 200, "[::1]:9465": 200, "10.0.0.3": 200, "relay.internal:443": 200, "Relay.Internal.": 200,
		"evil.example": 421, "localhost.evil.example": 421, "": 421, "relay.internal.evil.example": 421, "127.0.0.1.nip.io": 421,
	} {
		r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
		r.Host = host
		if w, _ := c.answer(t, r); w.Code != status {
			t.Errorf("%q: %d, want %d", host, w.Code, status)
		}
	}
}

func TestCallers(t *testing.T) {
	t.Parallel()
	closed := Config{Address: "0.0.0.0:9465", Token: adminToken, ReadToken: readToken}
	for name, test := range map[string]struct {
		cfg      Config
		give     func(*http.Request)
		status   int
		want     string
		mayWrite bool
	}{
		"loopback without a token": {Config{Address: "127.0.0.1:1"}, func(*http.Request) {}, 200, "local@192.0.2.1", true},
		"nothing":                  {closed, func(*http.Request) {}, 401, "", false},
		"the wrong token":          {closed, func(r *http.Request) { r.SetBasicAuth("ann", adminToken+"x") }, 401, "", false},
		"an empty token":           {Config{Address: "0.0.0.0:1", Token: adminToken}, func(r *http.Request) { r.SetBasicAuth("ann", "") }, 401, "", false},
		"an empty bearer":          {Config{Address: "0.0.0.0:1", Token: adminToken}, func(r *http.Request) { r.Header.Set("Authorization", "Bearer ") }, 401, "", false},
		"basic":                    {closed, func(r *http.Request) { r.SetBasicAuth("ann", adminToken) }, 200, "ann@192.0.2.1", true},
		"bearer":                   {closed, func(r *http.Request) { r.Header.Set("Authorization", "bearer "+adminToken) }, 200, "token@192.0.2.1", true},
		"a reader":                 {closed, func(r *http.Request) { r.SetBasicAuth("rob", readToken) }, 200, "rob@192.0.2.1", false},
		"a name with a line break": {closed, func(r *http.Request) { r.SetBasicAuth("a\nb", readToken) }, 200, "a b@192.0.2.1", false},
	} {
		r := httptest.NewRequest(http.MethodGet, "http://127.0.0.1/", http.NoBody)
		test.give(r)
		w, caller := test.cfg.answer(t, r)
		if w.Code != test.status || caller.Name != test.want || caller.MayChange != test.mayWrite || caller.MayReveal != (test.mayWrite && test.cfg.Token != "") {
			t.Errorf("%s: %d, %+v", name, w.Code, caller)
		}
		if (w.Code == 401) != (w.Header().Get("WWW-Authenticate") != "") || !strings.Contains(w.Header().Get("Content-Security-Policy"), "frame-ancestors 'none'") || w.Header().Get("Cache-Control") != "no-store" {
			t.Errorf("%s: %v", name, w.Header())
		}
	}
}

func TestCrossSite(t *testing.T) {
	t.Parallel()
	c := Config{Address: "127.0.0.1:9465"}
	for name, test := range map[string]struct {
		method, site, origin string
		status               int
	}{
		"a form of another site":         {"POST", "cross-site", "https://evil.example", 403},
		"a form of an older browser":     {"POST", "", "https://evil.example", 403},
		"a neighbour's port":             {"POST", "same-site", "http://127.0.0.1:8080", 403},
		"its own form":                   {"POST", "same-origin", "http://127.0.0.1", 200},
		"curl":                           {"POST", "", "", 200},
		"a link on another site":         {"GET", "cross-site", "", 200},
		"a deletion by another site":     {"DELETE", "cross-site", "https://evil.example", 403},
		"its own form, no fetch headers": {"POST", "", "http://127.0.0.1", 200},
	} {
		r := httptest.NewRequest(test.method, "http://127.0.0.1/pause", http.NoBody)
		if test.site != "" {
			r.Header.Set("Sec-Fetch-Site", test.site)
		}
		if test.origin != "" {
			r.Header.Set("Origin", test.origin)
		}
		if w, _ := c.answer(t, r); w.Code != test.status {
			t.Errorf("%s: %d, want %d", name, w.Code, test.status)
		}
	}
}

func TestProblems(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		cfg  Config
		want []string
	}{
		"off":                      {Config{}, nil},
		"loopback":                 {Config{Address: "127.0.0.1:9465"}, nil},
		"loopback by name":         {Config{Address: "localhost:9465"}, nil},
		"open":                     {Config{Address: "0.0.0.0:9465"}, []string{"set admin.token (OUTBOX_ADMIN_TOKEN), made with: openssl rand -base64 32; and set admin.tls"}},
		"every interface":          {Config{Address: ":9465"}, []string{"admin.behind_proxy: true"}},
		"a token in clear text":    {Config{Address: "10.0.0.3:9465", Token: adminToken}, []string{"clear text"}},
		"behind a proxy":           {Config{Address: "10.0.0.3:9465", Token: adminToken, BehindProxy: true}, nil},
		"TLS":                      {Config{Address: "10.0.0.3:9465", Token: adminToken, TLS: true}, nil},
		"TLS without a token":      {Config{Address: "10.0.0.3:9465", TLS: true}, []string{"admin.token"}},
		"a short token":            {Config{Address: "127.0.0.1:9465", Token: "secret"}, []string{"shorter than 16"}},
		"a token of blanks":        {Config{Address: "127.0.0.1:9465", Token: "                    "}, []string{"contains a blank"}},
		"a placeholder":            {Config{Address: "127.0.0.1:9465", Token: "CHANGE-ME-CHANGE-ME"}, []string{"is the placeholder of the example"}},
		"one token for both":       {Config{Token: adminToken, ReadToken: adminToken}, []string{"the same"}},
		"read token alone":         {Config{ReadToken: readToken}, []string{"without token"}},
		"a URL for a host":         {Config{AllowedHosts: []string{"https://relay.internal"}}, []string{"not a host name"}},
		"a name that is looked up": {Config{Address: "relay.internal:9465", Token: adminToken}, []string{"clear text"}},
	} {
		problems := test.cfg.Problems("admin")
		if len(problems) != len(test.want) {
			t.Errorf("%s: %v", name, problems)
			continue
		}
		for i, want := range test.want {
			if !strings.Contains(problems[i].Text, want) || strings.Contains(problems[i].Text, adminToken) {
				t.Errorf("%s: %q lacks %q", name, problems[i].Text, want)
			}
		}
	}
}
