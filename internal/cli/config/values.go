package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/outbox-relay/outbox-relay/internal/notify"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// optional returns a parser that accepts an empty text, too: the zero value.
func optional[T any](parse settings.Parser[T]) settings.Parser[T] {
	return func(text string) (T, string) {
		if text == "" {
			var none T
			return none, ""
		}
		return parse(text)
	}
}

// orNone returns a parser that takes off, and the false that YAML 1.1 reads there, for none.
func orNone[T any](parse settings.Parser[T]) settings.Parser[T] {
	return func(text string) (T, string) {
		if text == "off" || text == "false" {
			text = "none"
		}
		return parse(text)
	}
}

// databasePart shows a database's URL without its password.
func databasePart(raw settings.Secret) string {
	if raw == "" {
		return ""
	}
	pool, problem := ParseDatabaseURL(string(raw))
	if problem != "" {
		return settings.Mask
	}
	return databaseName(pool.ConnConfig)
}

// WithoutQuery shows where requests go; a token often stands in the query.
func WithoutQuery(raw string) string {
	address, _, has := strings.Cut(raw, "?")
	if has {
		address += "?" + settings.Mask
	}
	return address
}

// withoutUser shows a proxy without its credential.
func withoutUser(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" && raw != relay.NoProxy {
		return settings.Mask
	}
	if u.User != nil {
		return u.Scheme + "://" + settings.Mask + "@" + u.Host
	}
	return raw
}

// onlyHost shows a URL whose path is its secret.
func onlyHost(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return settings.Mask
	}
	return u.Scheme + "://" + u.Host + "/" + settings.Mask
}

// WithoutSecrets shows a URL without its credential, its query, and what looks like a key in its
// path.
func WithoutSecrets(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" {
		return settings.Mask
	}
	parts := strings.Split(u.EscapedPath(), "/")
	for i, part := range parts {
		if part != "" && (looksSecret(part) || i > 1 && hasKeyInPath(u.Hostname())) {
			parts[i] = settings.Mask
		}
	}
	return WithoutQuery(u.Scheme + "://" + u.Host + strings.Join(parts, "/") + map[bool]string{true: "?" + u.RawQuery}[u.RawQuery != ""])
}

// keyedHosts are services whose webhooks have their key in the path, whatever it looks like.
var keyedHosts = []string{"slack.com", "discord.com", "discordapp.com", "zapier.com", "make.com", "ifttt.com", "webhook.office.com", "pipedream.net", "webhook.site"}

func hasKeyInPath(host string) bool {
	return slices.ContainsFunc(keyedHosts, func(known string) bool { return host == known || strings.HasSuffix(host, "."+known) })
}

// looksSecret reports whether a part of a path may be a key: a long word or many words, one with
// digits among its letters, or one that cannot be spoken.
func looksSecret(part string) bool {
	words := strings.FieldsFunc(part, func(r rune) bool { return strings.ContainsRune("-_.~", r) })
	if len(words) >= 4 && len(part) >= 20 { // a passphrase
		return true
	}
	return slices.ContainsFunc(words, func(word string) bool {
		changes, consonants, most := 0, 0, 0
		hasDigit, onlyHex := false, true
		for i := range len(word) {
			digit := isDigit(word[i])
			if i > 0 && (digit != isDigit(word[i-1]) || isUpper(word[i]) && isLower(word[i-1])) {
				changes++
			}
			if consonants++; digit || strings.ContainsRune("aeiouyAEIOUY", rune(word[i])) {
				consonants = 0
			}
			most = max(most, consonants)
			hasDigit = hasDigit || digit
			onlyHex = onlyHex && (digit || strings.ContainsRune("abcdefABCDEF", rune(word[i])))
		}
		return len(word) > 20 || strings.Contains(word, "%") || most >= 5 || onlyHex && len(word) >= 8 && (!hasDigit || changes > 0) ||
			len(word) >= 6 && changes >= 2 || len(word) >= 7 && hasDigit && changes > 0
	})
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }
func isUpper(c byte) bool { return c >= 'A' && c <= 'Z' }
func isLower(c byte) bool { return c >= 'a' && c <= 'z' }

// onlyService shows the service of a channel, whose host may be the key.
func onlyService(raw settings.Secret) string { return notify.Kind(string(raw)) + "://" + settings.Mask }

func parseSchema(text string) (string, string) {
	text, problem := settings.ParseText(text)
	switch {
	case problem != "":
	case len(text) > 63:
		problem = "is longer than 63 bytes, which PostgreSQL would cut off"
	case strings.HasPrefix(text, "pg_") || text == "information_schema":
		problem = settings.Quote(text) + " belongs to PostgreSQL itself"
	}
	return text, problem
}

func parseSigningSecret(text string) (webhook.Secret, string) {
	s, err := webhook.ParseSecret(text)
	if err != nil {
		return s, err.Error()
	}
	return s, ""
}

// parseChannelURL never repeats the URL: everyone who knows it can post to the channel.
func parseChannelURL(text string) (string, string) {
	if _, problem := settings.ParseText(text); problem != "" {
		return "", problem
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return "", "is not a URL"
	case u.Scheme != "https" && u.Scheme != "http":
		return "", "is not a URL that starts with https:// or http://"
	case u.Hostname() == "":
		return "", "has no host"
	}
	return text, ""
}

// parseWait parses a duration that may be 0, with or without a unit.
func parseWait(text string) (time.Duration, string) {
	if d, err := time.ParseDuration(text); err == nil && d == 0 {
		return 0, ""
	}
	return settings.ParseDuration(text)
}

// parseSleepAfter leaves a relay that wakes for its archive enough time to begin it.
func parseSleepAfter(text string) (time.Duration, string) {
	d, problem := parseWait(text)
	if problem == "" && d > 0 && d < 10*time.Second {
		problem = fmt.Sprintf("%s is too short; write at least 10s, or 0 for never", d)
	}
	return d, problem
}

// parseBearer never repeats the token.
func parseBearer(text string) (settings.Secret, string) {
	switch {
	case text == "":
		return "", "is empty"
	case strings.HasPrefix(text, "Bearer "):
		return "", `begins with "Bearer "; write only what follows it`
	case strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", "contains a blank, a line break or another character that a token cannot have"
	}
	return settings.Secret(text), ""
}

// parseListen parses the address of a local server: host and port, or none, which like nothing at
// all means none.
func parseListen(text string) (string, string) {
	if text == "" || text == "none" {
		return "", ""
	}
	host, port, err := net.SplitHostPort(text)
	if n, problem := settings.ParseNumber(port); err != nil || problem != "" || n < 0 || n > 65535 {
		return "", settings.Quote(text) + ` is not an address; write host and port such as "127.0.0.1:9464", ":9464" for all addresses of the host, or none`
	}
	if _, err := netip.ParseAddr(host); err != nil && host != "" && host != "localhost" {
		return "", settings.Quote(text) + " names a host; write an IP address of this machine"
	}
	return text, ""
}

func parseUsername(text string) (string, string) {
	if strings.Contains(text, ":") {
		return "", "contains a colon, which ends a user name"
	}
	return settings.ParseText(text)
}

func parsePrefix(text string) (netip.Prefix, string) {
	if address, err := netip.ParseAddr(text); err == nil && address.Zone() == "" {
		return netip.Prefix{}, fmt.Sprintf(`%s is an address; write the network "%s/%d"`, settings.Quote(text), text, address.BitLen())
	}
	prefix, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return prefix, settings.Quote(text) + ` is not a network; write one such as "10.20.0.0/16"`
	case prefix != prefix.Masked():
		return prefix, fmt.Sprintf(`%s has bits behind its length; write "%s"`, settings.Quote(text), prefix.Masked())
	}
	return prefix, ""
}
