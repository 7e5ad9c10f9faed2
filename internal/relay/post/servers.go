package post

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"
)

// isLog reports whether a scheme names servers of a distributed log, of which a URL may name
// several.
func isLog(scheme string) bool {
	return scheme == "nats" || scheme == "tls" || scheme == "kafka" || scheme == "kafka+ssl"
}

// schemeOf returns what a URL begins with, in lower case.
func schemeOf(raw string) string {
	scheme, _, _ := strings.Cut(raw, ":")
	return strings.ToLower(scheme)
}

// ParseURL parses the URL of a destination. That of a log may name several servers of one cluster:
// nats://a:4222,b:4222, or with the scheme before each, as other programs write it.
func ParseURL(raw string) (*url.URL, error) {
	scheme := schemeOf(raw)
	if !isLog(scheme) {
		return url.Parse(raw)
	}
	_, rest, isURL := strings.Cut(raw, "://")
	if !isURL {
		return nil, fmt.Errorf("the url has no %s://", scheme)
	}
	rest = strings.ReplaceAll(rest, ","+scheme+"://", ",")
	return &url.URL{Scheme: scheme, Host: strings.TrimSuffix(rest, "/")}, nil
}

// servers returns the servers of a log's URL as host:port. port is that of a server without one.
func servers(host, port string) (list []string) {
	for server := range strings.SplitSeq(host, ",") {
		if _, _, err := net.SplitHostPort(server); err != nil {
			server = net.JoinHostPort(strings.Trim(server, "[]"), port)
		}
		list = append(list, server)
	}
	return list
}

// maxServers bounds how many servers a URL may name: one that answers names the others.
const maxServers = 32

// serversProblem says what is wrong with the URL of a log; empty: nothing. It repeats nothing that
// may be a credential.
func serversProblem(raw string, e Egress) string {
	scheme := schemeOf(raw)
	u, err := ParseURL(raw)
	switch {
	case err != nil:
		return fmt.Sprintf("names no server; write one such as %s://%s.internal", scheme, strings.TrimSuffix(scheme, "+ssl"))
	case strings.Contains(raw, "@"):
		return "contains user info; move it to basic_auth, bearer_token, nats.credentials_file or nats.nkey_file"
	case strings.Contains(u.Host, "://"):
		return "names servers with another scheme than the first; write one scheme, and a comma between servers"
	case strings.ContainsAny(u.Host, "/?#"):
		return "has something behind the servers, which would be ignored; remove it"
	}
	list := strings.Split(u.Host, ",")
	if len(list) > maxServers {
		return fmt.Sprintf("names %d servers; at most %d are allowed", len(list), maxServers)
	}
	for _, server := range list {
		if text := urlProblem("http://"+server, e); text != "" {
			return "names a server that cannot be used: " + strings.ReplaceAll(text, urlExample, "write host:port")
		}
		host := strings.Trim(server, "[]")
		if _, err := netip.ParseAddr(host); err == nil && strings.Contains(host, ":") && !strings.HasPrefix(server, "[") {
			return "has an IPv6 address without [ ]"
		}
	}
	return ""
}
