package main

import (
	"crypto/tls"
	"path"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// consoleConfig holds the settings of section admin.
type consoleConfig struct {
	listen, pathPrefix string
	token, readToken   settings.Secret
	certFile, keyFile  string
	behindProxy        bool
	allowedHosts       []string
	certificate        func() *tls.Certificate // nil: HTTP
}

// equal reports whether nothing that is read from the configuration differs.
func (a consoleConfig) equal(b consoleConfig) bool {
	return a.listen == b.listen && a.pathPrefix == b.pathPrefix && a.token == b.token && a.readToken == b.readToken &&
		a.certFile == b.certFile && a.keyFile == b.keyFile && a.behindProxy == b.behindProxy && slices.Equal(a.allowedHosts, b.allowedHosts)
}

func (c *config) consoleRows() []settings.Row {
	a := &c.console
	return []settings.Row{
		{Path: "admin.listen", Env: "ADMIN_LISTEN", Value: settings.One("127.0.0.1:9465", parseListen, settings.To(&a.listen), defaultAdminListen)},
		{Path: "admin.token", Env: "ADMIN_TOKEN", FromFile: true, Value: settings.One("${OUTBOX_ADMIN_TOKEN}", optional(settings.ParseSecret), settings.To(&a.token))},
		{Path: "admin.read_token", Env: "ADMIN_READ_TOKEN", FromFile: true, Value: settings.One("${OUTBOX_ADMIN_READ_TOKEN}", optional(settings.ParseSecret), settings.To(&a.readToken))},
		{Path: "admin.allowed_hosts", Env: "ADMIN_ALLOWED_HOSTS", Value: settings.Many("[relay.internal]", settings.ParseText, settings.To(&a.allowedHosts))},
		{Path: "admin.behind_proxy", Env: "ADMIN_BEHIND_PROXY", Value: settings.One("true", settings.ParseBool, settings.To(&a.behindProxy), false)},
		{Path: "admin.path_prefix", Env: "ADMIN_PATH_PREFIX", Value: settings.One("/outbox", optional(parsePathPrefix), settings.To(&a.pathPrefix), "")},
		{Path: "admin.tls.cert_file", Env: "ADMIN_TLS_CERT_FILE", Value: settings.One("/etc/tls/tls.crt", settings.ParseText, settings.To(&a.certFile))},
		{Path: "admin.tls.key_file", Env: "ADMIN_TLS_KEY_FILE", Value: settings.One("/etc/tls/tls.key", settings.ParseText, settings.To(&a.keyFile))},
	}
}

func parsePathPrefix(text string) (string, string) {
	if !strings.HasPrefix(text, "/") || strings.HasSuffix(text, "/") || strings.ContainsAny(text, " ?#%\"'<>\\") || path.Clean(text) != text {
		return "", settings.Quote(text) + ` is not a path; write one such as "/outbox", without a slash at its end`
	}
	return text, ""
}

// checkConsole reports mistakes of section admin beyond the single value.
func (c *config) checkConsole() {
	a := &c.console
	cert, key := "admin.tls.cert_file", "admin.tls.key_file"
	switch {
	case c.Failed(cert) || c.Failed(key):
	case (a.certFile == "") != (a.keyFile == ""):
		c.ProblemAt(map[bool]string{true: cert, false: key}[a.certFile != ""], "is set without the other file of tls; set both")
	case a.certFile != "":
		pair, err := settings.WatchKeyPair(&c.log, a.certFile, a.keyFile)
		if err != nil {
			c.ProblemAt(cert, err.Error())
			break
		}
		c.WarnReadable(key, a.keyFile)
		a.certificate = pair.Get
	}
	for _, p := range c.guard().Problems("admin") {
		if !c.Failed(p.Path) && !c.FailedBelow("admin") {
			c.ProblemAt(p.Path, p.Text)
		}
	}
}

func (c *config) guard() guard.Config {
	a := c.console
	return guard.Config{
		Address: a.listen, Token: a.token, ReadToken: a.readToken, TLS: a.certificate != nil, BehindProxy: a.behindProxy, AllowedHosts: a.allowedHosts,
	}
}
