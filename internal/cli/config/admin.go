package config

import (
	"crypto/tls"
	"net/url"
	"path"
	"reflect"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Admin holds the settings of section admin.
type Admin struct {
	Listen, PathPrefix string
	Token, ReadToken   settings.Secret
	CertFile, KeyFile  string
	BehindProxy        bool
	AllowedHosts       []string
	Certificate        func() *tls.Certificate // nil: HTTP
}

// Equal reports whether nothing that is read from the configuration differs.
func (a Admin) Equal(b Admin) bool {
	a.Certificate, b.Certificate = nil, nil
	return reflect.DeepEqual(a, b)
}

func (c *Config) adminRows() []settings.Row {
	a := &c.Admin
	return []settings.Row{
		{Path: "admin.listen", Value: settings.One("127.0.0.1:9465", orNone(parseListen), settings.To(&a.Listen), defaultAdminListen)},
		{Path: "admin.token", FromFile: true, Value: settings.One("${OUTBOX_ADMIN_TOKEN}", optional(settings.ParseSecret), settings.To(&a.Token))},
		{Path: "admin.read_token", FromFile: true, Value: settings.One("${OUTBOX_ADMIN_READ_TOKEN}", optional(settings.ParseSecret), settings.To(&a.ReadToken))},
		{Path: "admin.allowed_hosts", Value: settings.Many("[relay.internal]", settings.ParseText, settings.To(&a.AllowedHosts))},
		{Path: "admin.behind_proxy", Value: settings.One("true", settings.ParseBool, settings.To(&a.BehindProxy), false)},
		{Path: "admin.public_url", Value: settings.One("https://relay.internal/outbox", optional(parsePublicURL), settings.To(&c.Relay.Alerts.PublicURL), "")},
		{Path: "admin.path_prefix", Value: settings.One("/outbox", optional(parsePathPrefix), settings.To(&a.PathPrefix), "")},
		{Path: "admin.tls.cert_file", Value: settings.One("/etc/tls/tls.crt", settings.ParseText, settings.To(&a.CertFile))},
		{Path: "admin.tls.key_file", Value: settings.One("/etc/tls/tls.key", settings.ParseText, settings.To(&a.KeyFile))},
	}
}

// parsePublicURL returns the address of the page, which alerts link to, without a slash at its end.
func parsePublicURL(text string) (string, string) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return "", settings.Quote(text) + ` is not the address of a page; write one such as "https://relay.internal/outbox"`
	}
	return strings.TrimRight(text, "/"), ""
}

func parsePathPrefix(text string) (string, string) {
	if !strings.HasPrefix(text, "/") || strings.HasSuffix(text, "/") || strings.ContainsAny(text, " ?#%\"'<>\\") || path.Clean(text) != text {
		return "", settings.Quote(text) + ` is not a path; write one such as "/outbox", without a slash at its end`
	}
	return text, ""
}

// checkAdmin reports mistakes of section admin beyond the single value.
func (c *Config) checkAdmin() {
	c.Admin.Certificate = c.keyPair("admin.tls", c.Admin.CertFile, c.Admin.KeyFile)
	for _, p := range c.Guard().Problems("admin") {
		if !c.Failed(p.Path) && !c.FailedBelow("admin") {
			c.ProblemAt(p.Path, p.Text)
		}
	}
}

// Guard returns who may reach the page and the API.
func (c *Config) Guard() guard.Config {
	a := c.Admin
	return guard.Config{
		Address: a.Listen, Token: a.Token, ReadToken: a.ReadToken, TLS: a.Certificate != nil, BehindProxy: a.BehindProxy, AllowedHosts: a.AllowedHosts, Log: c.Log,
	}
}
