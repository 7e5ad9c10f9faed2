package config

import (
	"crypto/tls"
	"encoding/base64"
	"errors"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// bindTLS reads the files of a destination's TLS settings. TLS settings of its own beside a URL
// without TLS are a mistake: the operator believes that requests are encrypted.
func (c *Config) bindTLS(path string, d *destination) {
	t := &d.Wire.TLS
	if scheme, secure := withoutTLS(d.URL); secure != "" {
		*t = relay.TLS{}
		for _, key := range []string{"ca_file", "cert_file", "key_file", "min_version", "server_name"} {
			if c.Own(path + ".tls." + key) {
				c.ProblemAt(path+".tls."+key, "has no effect, as the url begins with "+scheme+"://; write "+secure+"://, or remove tls")
			}
		}
		return
	}
	if ca := path + ".tls.ca_file"; d.caFile != "" && !c.Failed(ca) {
		if w, err := settings.WatchAuthorities(&c.Log, d.caFile); err != nil {
			c.ProblemAt(ca, err.Error())
		} else {
			t.Roots = w.Get
		}
	}
	t.Certificate = c.keyPair(path+".tls", d.certFile, d.keyFile)
}

// keyPair returns the certificate in the two files that a section tls names; nil: it names none, or
// has a mistake, which is reported.
func (c *Config) keyPair(section, certFile, keyFile string) func() *tls.Certificate {
	cert, key := section+".cert_file", section+".key_file"
	switch {
	case c.Failed(cert) || c.Failed(key) || certFile == "" && keyFile == "":
		return nil
	case certFile == "":
		c.ProblemAt(key, "is set without tls.cert_file; set both")
		return nil
	case keyFile == "":
		c.ProblemAt(cert, "is set without tls.key_file; set both")
		return nil
	}
	pair, err := settings.WatchKeyPair(&c.Log, certFile, keyFile)
	if err != nil {
		c.ProblemAt(cert, err.Error())
		return nil
	}
	c.WarnReadable(key, keyFile)
	if notice := pair.Notice(); notice != "" {
		c.WarnAt(cert, notice)
	}
	return pair.Get
}

// withoutTLS returns the scheme of a URL without TLS, and the one that it has with TLS; both empty:
// the URL has TLS.
func withoutTLS(url string) (scheme, secure string) {
	switch scheme, _, _ = strings.Cut(strings.ToLower(url), ":"); scheme {
	case "http":
		return scheme, "https"
	case "nats":
		return scheme, "tls"
	case "kafka":
		return scheme, "kafka+ssl"
	}
	return "", ""
}

// isBroker reports whether a URL names servers of NATS or Kafka.
func isBroker(url string) bool {
	scheme, _, _ := strings.Cut(strings.ToLower(url), ":")
	return scheme != "http" && scheme != "https"
}

// authorization returns what a destination's requests carry as that header; nil: nothing.
func (c *Config) authorization(path string, d *destination) func() string {
	keys := slices.DeleteFunc([]string{"bearer_token", "bearer_token_file", "basic_auth"}, func(key string) bool { return !c.Has(path + "." + key) })
	switch {
	case len(keys) > 1:
		c.ProblemAt(path+"."+keys[1], "is set beside "+keys[0]+", and one request can carry one credential; remove one of them")
		return nil
	case len(keys) == 0 || c.Failed(path+"."+keys[0]) || c.FailedBelow(path+"."+keys[0]):
		return nil
	}
	basic := func(password string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(d.user+":"+password))
	}
	switch at := path + "." + keys[0]; {
	case d.bearer != "":
		return fixed("Bearer " + string(d.bearer))
	case d.bearerFile != "":
		return c.followSecret(at, d.bearerFile, parseBearer, func(token string) string { return "Bearer " + token })
	case d.user == "":
		c.ProblemAt(at, `has no username; write {username: …, password: "${…}"}`)
	case d.password != "" && d.passwordFile != "":
		c.ProblemAt(at+".password_file", "is set beside password; remove one of them")
	case d.password != "":
		return fixed(basic(string(d.password)))
	case d.passwordFile != "":
		return c.followSecret(at+".password_file", d.passwordFile, settings.ParseSecret, basic)
	default:
		c.ProblemAt(at, "has neither password nor password_file; set one of them")
	}
	return nil
}

// bindBroker reads the files of a destination of NATS. What a destination of NATS or Kafka inherits
// from defaults, and is about HTTP, is not its own mistake.
func (c *Config) bindBroker(path string, d *destination) {
	if isBroker(d.URL) {
		for key, codes := range map[string]*[]int{".responses.retry": &d.Responses.Retry, ".responses.fail": &d.Responses.Fail} {
			if !c.Own(path + key) {
				*codes = nil
			}
		}
		if !c.Own(path + ".batch.max") {
			d.Batch.Max = 0
		}
		if c.Own(path + ".excerpts") {
			c.ProblemAt(path+".excerpts", "has no effect: NATS and Kafka answer without a body; remove it")
		}
	}
	whole := func(content string) string { return content }
	follow := func(key, name string, check func(string) error) func() string {
		return c.followSecret(path+key, name, func(text string) (settings.Secret, string) {
			if err := check(text); err != nil {
				return "", err.Error()
			}
			return settings.Secret(text), ""
		}, whole)
	}
	if d.credentialsFile != "" {
		d.NATS.Credentials = follow(".nats.credentials_file", d.credentialsFile, natspost.CheckCredentials)
	}
	if d.seedFile != "" {
		d.NATS.Seed = follow(".nats.nkey_file", d.seedFile, natspost.CheckSeed)
	}
}

func fixed(header string) func() string { return func() string { return header } }

// followSecret returns a header made of what a file holds. path is the setting that names the file.
func (c *Config) followSecret(path, name string, parse settings.Parser[settings.Secret], header func(string) string) func() string {
	w, err := settings.WatchFiles(&c.Log, settings.MaxSecret, func(contents [][]byte) (string, error) {
		secret, problem := parse(strings.TrimRight(string(contents[0]), "\r\n"))
		if problem != "" {
			return "", errors.New(name + " " + problem)
		}
		return header(string(secret)), nil
	}, name)
	if err != nil {
		c.ProblemAt(path, err.Error())
		return nil
	}
	c.WarnReadable(path, name)
	return w.Get
}
