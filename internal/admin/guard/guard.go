// Package guard decides who may reach the API and the page, and what a browser may do with them.
// Every request passes it.
package guard

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/admin"
	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// maxBodyBytes bounds a request: the largest is a selection with many ids.
const maxBodyBytes = 1 << 20

// minTokenBytes keeps a token from being guessed.
const minTokenBytes = 16

// Config says who may do what.
type Config struct {
	// Address that the server listens on.
	Address string
	// Token of administrators. Empty: only a loopback address is allowed, whose users may change
	// everything and reveal nothing.
	Token settings.Secret
	// ReadToken of those who may only look. Empty: there are none.
	ReadToken settings.Secret
	// TLS reports whether the server speaks TLS itself, and BehindProxy that a proxy in front of it
	// does.
	TLS, BehindProxy bool
	// AllowedHosts are names under which the server may be reached, beside localhost and IP
	// addresses.
	AllowedHosts []string
	// Log of wrong tokens. The zero value discards.
	Log zerolog.Logger
}

// Problems returns the mistakes of the configuration. path is that of its section.
func (c Config) Problems(path string) []check.Problem {
	var v check.Problems
	for key, token := range map[string]settings.Secret{"token": c.Token, "read_token": c.ReadToken} {
		v.Require(token == "" || len(token) >= minTokenBytes, path+"."+key, "is shorter than %d characters; make one with: openssl rand -base64 32", minTokenBytes)
		v.Require(!strings.ContainsAny(string(token), " \t\r\n"), path+"."+key, "contains a blank, which Authorization: Bearer cannot carry; make one with: openssl rand -base64 32")
		v.Require(!strings.Contains(string(token), "CHANGE-ME"), path+"."+key, "is the placeholder of the example, which everyone knows; make one with: openssl rand -base64 32")
	}
	v.Require(c.Token == "" || c.Token != c.ReadToken, path+".read_token", "is the same as token; write another one, or remove it")
	v.Require(c.Token != "" || c.ReadToken == "", path+".read_token", "is set without token, so that nothing could be changed and everything read without it; set both")
	for _, host := range c.AllowedHosts {
		v.Require(host != "" && !strings.ContainsAny(host, "/:* "), path+".allowed_hosts", "%q is not a host name; write one such as relay.internal, without scheme and port", host)
	}
	if c.Address == "" || admin.IsLoopback(c.Address) {
		return v
	}
	var missing []string
	if c.Token == "" {
		missing = append(missing, path+".token (OUTBOX_ADMIN_TOKEN), made with: openssl rand -base64 32")
	}
	if !c.TLS && !c.BehindProxy {
		missing = append(missing, fmt.Sprintf("%s.tls, as a token would travel in clear text, or %[1]s.behind_proxy: true where a proxy ends TLS", path))
	}
	v.Require(missing == nil, path+".listen", "%s can be reached from other hosts; set %s; or listen on 127.0.0.1:9465", c.Address, strings.Join(missing, "; and set "))
	return v
}

// A Caller is who sends a request.
type Caller struct {
	// Name for the audit.
	Name string
	// MayChange and MayReveal say what the role allows beyond reading.
	MayChange, MayReveal bool
}

type callerKey struct{}

// CallerOf returns who sends a request that has passed the guard.
func CallerOf(ctx context.Context) Caller {
	caller, _ := ctx.Value(callerKey{}).(Caller)
	return caller
}

// A Refusal answers a request that may not pass, in the form that its reader understands.
type Refusal func(w http.ResponseWriter, r *http.Request, status int, title, detail string)

// Handler lets requests pass to next that come from an allowed host and a known caller, and refuses
// the others.
func (c Config) Handler(next http.Handler, refuse Refusal) http.Handler {
	sameOrigin := http.NewCrossOriginProtection()
	sameOrigin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refuse(w, r, http.StatusForbidden, "Another site sent this request",
			"A page of another origin may not change anything here. Open the page under its own address and repeat the change there.")
	}))
	inner := sameOrigin.Handler(next)
	tokens := &wrongTokens{log: c.Log, of: map[string]*guesses{}}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		setHeaders(w.Header())
		if !c.Allows(r.Host) {
			refuse(w, r, http.StatusMisdirectedRequest, "This host name is not allowed",
				"Add the name under which you reach this server to admin.allowed_hosts. Names that are not listed are refused, because a foreign site could point its own name here.")
			return
		}
		from, tries := addressOf(r), c.Token != "" && r.Header.Get("Authorization") != ""
		slowed := from
		if role := c.knownAs(r); tries && role != "" {
			slowed = role
		}
		if tries && !tokens.mayTry(slowed, time.Now()) {
			w.Header().Set("Retry-After", "1")
			refuse(w, r, http.StatusTooManyRequests, "Too many wrong tokens", "Wrong tokens came from your address. From there one token a second is compared now; try again. Who has signed in before and keeps cookies does not wait for others.")
			return
		}
		caller, known := c.caller(r, from)
		if !known {
			if tries {
				tokens.wrong(slowed, from, time.Now())
			}
			w.Header().Set("WWW-Authenticate", `Basic realm="outbox-relay", charset="UTF-8"`)
			refuse(w, r, http.StatusUnauthorized, "Sign in",
				"Give your name as the user and the token (admin.token or admin.read_token) as the password, or send the header Authorization: Bearer TOKEN.")
			return
		}
		if tries && slowed == from {
			c.remember(w, caller)
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBodyBytes)
		inner.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, caller)))
	})
}

// setHeaders says what a browser may do with an answer: show it alone, run the scripts of this
// server, and keep nothing.
func setHeaders(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "+
		"form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}

// Allows reports whether a request may name the host. A foreign site can point its own name
// here, but no IP address.
func (c Config) Allows(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.ToLower(strings.Trim(host, "[]")), ".")
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" {
		return true
	}
	return slices.ContainsFunc(c.AllowedHosts, func(allowed string) bool { return strings.EqualFold(allowed, host) })
}

func addressOf(r *http.Request) string {
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		return host
	}
	return "unknown"
}

// caller returns who sends a request from an address. The name of Basic authentication is chosen by
// the client.
func (c Config) caller(r *http.Request, from string) (Caller, bool) {
	if c.Token == "" {
		return Caller{Name: "local@" + from, MayChange: true}, true
	}
	name, secret, basic := r.BasicAuth()
	if !basic {
		name = "token"
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if !strings.EqualFold(scheme, "Bearer") {
			return Caller{}, false
		}
		secret = token
	}
	// Both comparisons are made, so that the time says nothing about either token.
	isAdmin, isReader := equal(secret, c.Token), equal(secret, c.ReadToken)
	caller := Caller{Name: cmp.Or(plain.Shorten(plain.Line(name), 64), "token") + "@" + from, MayChange: isAdmin, MayReveal: isAdmin}
	return caller, isAdmin || isReader
}

// equal compares in constant time. Nothing equals an empty token.
func equal(given string, token settings.Secret) bool {
	a, b := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(string(token)))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1 && token != ""
}
