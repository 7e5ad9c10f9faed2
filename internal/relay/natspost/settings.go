package natspost

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/outbox-relay/outbox-relay/internal/check"
)

// Settings are what only a destination of NATS has. The zero value is not usable: Subject and
// Stream are required.
type Settings struct {
	// Subject that events are published to. {type} stands for the event's type, {destination} for
	// the destination's name and {partition} for a number below Partitions, as in "outbox.{type}"
	// or "outbox.{partition}.{type}".
	Subject string
	// Partitions is over how many numbers ordering keys are spread, so that readers can share a
	// stream and keep each key's order. An event without a key goes by its id. While it changes,
	// events of a key may overtake each other. 0: there are none.
	Partitions int
	// Stream that must store the events. The server refuses a message that another stream would
	// store.
	Stream string
	// InboxPrefix begins the subjects on which acknowledgements arrive; a user's rights may be
	// limited to one. Empty: _INBOX.
	InboxPrefix string
	// Credentials returns the content of a credentials file: a user's JWT and the seed of its NKey.
	// It is called for every connection, from many goroutines, so that what it returns may change;
	// it must return at once. nil: there is none.
	Credentials func() string
	// Seed returns the seed of an NKey, like Credentials. nil: there is none.
	Seed func() string
}

// isStreamName reports whether a stream may have this name: it holds what a file's name may, but
// for the signs of subjects.
func isStreamName(name string) bool {
	return len(name) <= 255 && name != "" && !strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f || strings.ContainsRune(`.*>/\`, r) })
}

// inboxPrefix is what subjects may begin with, and a dot behind it.
var inboxPrefix = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`)

// Problems returns the mistakes in the settings of the named destination. path is where they stand.
func (s Settings) Problems(path, destination string) []check.Problem {
	var v check.Problems
	v.Refuse(path+".subject", templateProblem(s.Subject, destination))
	named := strings.Contains(s.Subject, partitionPlace)
	v.Require(s.Partitions >= 0 && s.Partitions <= maxPartitions, path+".partitions", "%d is out of range; write 1 to %d", s.Partitions, maxPartitions)
	v.Require(!named || s.Partitions != 0, path+".partitions", "is not set, and the subject holds {partition}; write as many as readers shall work at once, such as 16")
	v.Require(named || s.Partitions == 0, path+".partitions", "has no effect: the subject holds no {partition}")
	v.Require(s.Stream != "", path+".stream", "is not set; write the name of the stream that stores the events")
	v.Require(s.Stream == "" || isStreamName(s.Stream), path+".stream", "%q is not the name of a stream: it holds a blank, '.', '*', '>' or a slash", s.Stream)
	v.Require(s.InboxPrefix == "" || len(s.InboxPrefix) <= 128 && inboxPrefix.MatchString(s.InboxPrefix), path+".inbox_prefix",
		"%q is not usable; write words of letters, digits, '-' and '_' with dots between them", s.InboxPrefix)
	v.Require(s.Credentials == nil || s.Seed == nil, path+".nkey_file", "is set beside credentials_file, and a connection can have one identity; remove one of them")
	return v
}

// CheckCredentials returns what is wrong with the content of a credentials file. It repeats nothing
// of it.
func CheckCredentials(content string) error {
	token, err := nkeys.ParseDecoratedJWT([]byte(content))
	if err != nil || strings.Count(token, ".") != 2 {
		return errors.New("holds no user's JWT (-----BEGIN NATS USER JWT-----); write it with: nsc generate creds")
	}
	if _, err := nkeys.ParseDecoratedUserNKey([]byte(content)); err != nil {
		return errors.New("holds no seed of a user's NKey (-----BEGIN USER NKEY SEED-----); write it with: nsc generate creds")
	}
	return nil
}

// CheckSeed returns what is wrong with the content of an NKey file. It repeats nothing of it.
func CheckSeed(content string) error {
	if _, err := nkeys.ParseDecoratedUserNKey([]byte(content)); err != nil {
		return errors.New("holds no seed of a user's NKey, which begins with SU; write one with: nsc generate nkey --user")
	}
	return nil
}

// identify makes a connection prove who the relay is, with the secrets of this moment.
func (c *Client) identify(options *nats.Options) error {
	switch {
	case c.cfg.Credentials != nil:
		content := c.cfg.Credentials()
		if err := CheckCredentials(content); err != nil {
			return fmt.Errorf("the file of nats.credentials_file %w", err)
		}
		if err := expiredCredentials(content, time.Now()); err != nil {
			return err
		}
		return nats.UserCredentialBytes([]byte(content))(options)
	case c.cfg.Seed != nil:
		pair, err := nkeys.ParseDecoratedUserNKey([]byte(c.cfg.Seed()))
		if err != nil {
			return errors.New("the file of nats.nkey_file holds no seed of a user's NKey")
		}
		options.SignatureCB = pair.Sign
		options.Nkey, err = pair.PublicKey()
		return err
	case c.cfg.Authorization != nil:
		kind, value, _ := strings.Cut(c.cfg.Authorization(), " ")
		if kind != "Basic" {
			return nats.Token(value)(options)
		}
		pair, _ := base64.StdEncoding.DecodeString(value)
		options.User, options.Password, _ = strings.Cut(string(pair), ":")
	}
	return nil
}

// expiredCredentials returns an error if the JWT of a credentials file has ended: the server would
// say nothing but that it refuses the user. What the file holds is known to be a JWT.
func expiredCredentials(content string, now time.Time) error {
	token, _ := nkeys.ParseDecoratedJWT([]byte(content))
	claims, err := base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[1])
	var claim struct {
		Expires int64 `json:"exp"`
	}
	if err != nil || json.Unmarshal(claims, &claim) != nil || claim.Expires == 0 || now.Unix() < claim.Expires {
		return nil // or the server decides
	}
	return fmt.Errorf("%w at %s; replace the file of nats.credentials_file, which needs no restart", errExpired, time.Unix(claim.Expires, 0).UTC().Format("2006-01-02 15:04 MST"))
}

var errExpired = errors.New("the user's credentials expired")
