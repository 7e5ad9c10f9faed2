package alert

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// ReasonOf returns the reason of an error that is stored as text alone: an answer begins with its
// status.
func ReasonOf(text string) policy.Reason {
	first, _, _ := strings.Cut(text, " ")
	if status, err := strconv.Atoi(first); err == nil && status >= 300 && status <= 599 {
		return policy.ClassifyResponse(status, nil, "", policy.Responses{}, time.Time{}).Reason
	}
	for _, known := range []struct {
		sign   string
		reason policy.Reason
	}{
		{"lookup ", policy.ReasonDNS}, // whatever kept the lookup from an answer
		{"no such host", policy.ReasonDNS},
		{"tls: ", policy.ReasonTLS},
		{"x509: ", policy.ReasonTLS},
		{"certificate", policy.ReasonTLS},
		{plainHTTP, policy.ReasonTLS},
		{"dial ", policy.ReasonConnect},
		{"timeout", policy.ReasonTimeout},
		{"deadline exceeded", policy.ReasonTimeout},
		{"no answer within", policy.ReasonTimeout},
	} {
		if strings.Contains(text, known.sign) {
			return known.reason
		}
	}
	return policy.ReasonUnexpected
}

// clocksDiffer reports whether a receiver that verifies signatures found the request's time too far
// from its own: with a wrong secret it answers something else.
func clocksDiffer(reason policy.Reason, text string) bool {
	return reason == policy.ReasonUnauthorized && strings.Contains(text, "timestamp-out-of-tolerance")
}

// plainHTTP is what Go says of an answer in plain HTTP at an https URL.
const plainHTTP = "server gave HTTP response to HTTPS client"

func speaksNoTLS(text string) bool {
	return strings.Contains(text, plainHTTP) || strings.Contains(text, "does not look like a TLS handshake")
}

// Fault says what a destination does for which everything sent there fails, with the given error.
func Fault(text string) string {
	reason := ReasonOf(text)
	if clocksDiffer(reason, text) {
		return "finds the time of the relay's requests too far from its own clock"
	}
	if speaksNoTLS(text) {
		return "does not speak TLS, which its URL asks for"
	}
	switch reason {
	case policy.ReasonUnauthorized:
		return "refuses the relay's credentials or signature"
	case policy.ReasonNotFound:
		return "answers that nothing is at its URL"
	case policy.ReasonRedirect:
		return "redirects to another URL, which is never followed"
	case policy.ReasonDNS:
		return "has a name that does not resolve"
	case policy.ReasonTLS:
		return "fails the TLS handshake (certificates)"
	case policy.ReasonConnect:
		return "accepts no connection"
	case policy.ReasonTimeout:
		return "does not answer in time"
	case policy.ReasonRateLimited:
		return "asks for fewer requests"
	case policy.ReasonEgress:
		return "has an address that the relay may not connect to"
	case policy.ReasonServerError, policy.ReasonUnavailable:
		return "answers with its own errors"
	}
	return "is down"
}

// logNamed finds the stream of NATS or the topic of Kafka that an error names. Errors of HTTP begin
// with the status code.
var logNamed = regexp.MustCompile(`^(?:[^0-9].*?)??(there is no )?(stream|topic)(?: than)? "([^"]+)"(?:; create it with the subject "([^"]+)")?`)

// NamesLog reports whether an error names a stream or a topic, and so says what to do.
func NamesLog(text string) bool { return logNamed.MatchString(text) }

// A Marker marks a name of a setting or a command, which people copy.
type Marker func(string) string

// Repair says how to fix the error for which a destination fails, of a log that the error names or
// of a receiver; empty: only the error says it.
func Repair(destination string, reason policy.Reason, text string, mark Marker) string {
	found := logNamed.FindStringSubmatch(text)
	if clocksDiffer(reason, text) {
		return repairClocks(mark)
	}
	if found == nil && speaksNoTLS(text) {
		return fmt.Sprintf("Correct the scheme or the port of %s, then %s.", mark("destinations."+destination+".url"), reload(destination))
	}
	if found == nil {
		return repairReceiver(destination, reason, mark)
	}
	kind, name, subject := found[2], found[3], found[4]
	do, setting := "Do what the error says", map[string]string{"stream": "nats.stream", "topic": "kafka.topic"}[kind]
	switch {
	case found[1] == "":
	case kind == "stream":
		command := "nats stream add " + plain.ShellWord(name)
		if subject != "" {
			command += " --subjects " + plain.ShellWord(subject)
		}
		if do = "Create the stream: " + mark(command); subject != "" {
			do += " (or a pattern that covers all its subjects)"
		}
	default:
		do = fmt.Sprintf("Create the topic %s, or give the relay's user the right to see it", mark(name))
	}
	return fmt.Sprintf("%s, or correct %s and %s.", do, mark("destinations."+destination+"."+setting), reload(destination))
}

func repairClocks(mark Marker) string {
	return "The clocks of the relay and the receiver differ: compare them (" + mark("date -u") + " on both machines), and synchronize the one that is wrong. The secret is right."
}

func repairReceiver(destination string, reason policy.Reason, mark Marker) string {
	setting := func(name string) string { return mark("destinations." + destination + "." + name) }
	address, reload := setting("url"), reload(destination)
	if destination == "default" {
		address += " (or " + mark("OUTBOX_DESTINATION_URL") + ")"
	}
	switch reason {
	case policy.ReasonUnauthorized:
		return fmt.Sprintf("Make %s (or its credentials) those of the receiver, then %s.", setting("signing_secrets"), reloadSecret(destination))
	case policy.ReasonDNS:
		return fmt.Sprintf("Correct %s, then %s, or fix the name in DNS, or the name server that the relay asks.", address, reload)
	case policy.ReasonNotFound, policy.ReasonRedirect:
		return fmt.Sprintf("Correct %s, then %s, or fix the receiver.", address, reload)
	case policy.ReasonConnect:
		return fmt.Sprintf("Start the receiver, or correct %s and %s.", address, reload)
	case policy.ReasonTLS:
		return fmt.Sprintf("Correct %s (such as %s), then %s, or fix the receiver's certificate.", setting("tls"), setting("tls.ca_file"), reload)
	case policy.ReasonTimeout:
		return fmt.Sprintf("Find out in its log why the receiver is slow, or raise %s and %s.", setting("timeout"), reload)
	case policy.ReasonRateLimited:
		return fmt.Sprintf("The receiver asks for fewer requests: set %s, then %s.", setting("rate_limit"), reload)
	case policy.ReasonEgress:
		return fmt.Sprintf("The relay may not connect to this address: see %s in its configuration.", mark("egress"))
	case policy.ReasonServerError, policy.ReasonUnavailable, policy.ReasonTransient, policy.ReasonUnexpected, policy.ReasonNetwork, policy.ReasonMalformed:
		return "The log of the receiver says more."
	}
	return ""
}

// reload says how a relay reads a changed setting of a destination. Only the destination "default"
// may come from the environment, which a signal cannot change. The database does not say where a
// relay's settings come from.
func reload(destination string) string {
	if destination == "default" {
		return "reload the relay (SIGHUP), or restart it if the environment sets it"
	}
	return "reload the relay (SIGHUP)"
}

// reloadSecret says how a relay reads a changed secret, which any destination may take from a
// variable.
func reloadSecret(destination string) string {
	if destination == "default" {
		return reload(destination)
	}
	return reload(destination) + ", or restart it if a variable holds them"
}
