package identity

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// Identity is what tells one database from another, and the original from its copy.
type Identity struct {
	// SystemIdentifier of the server: initdb chooses it, and every physical copy has the same. 0:
	// the server does not tell.
	SystemIdentifier int64 `json:"system_identifier,string"`
	// DatabaseOID within the server: a restored dump and a database made from a template have
	// another.
	DatabaseOID int64 `json:"database_oid"`
	// Timeline of the server: grows with every promotion and point-in-time recovery. It alone is no
	// difference.
	Timeline int32 `json:"timeline"`
	// Environment that relays name. Empty: none.
	Environment string `json:"environment"`
	// Addresses under which relays are configured to reach it, each as
	// host:port[,host:port…]/database.
	Addresses []string `json:"addresses"`
	// RecordedAt is when it was recorded; nil for what was found.
	RecordedAt *time.Time `json:"recorded_at,omitempty"`
}

// Difference is one respect in which a database is not the recorded one.
type Difference struct {
	What     string `json:"what"` // "system identifier", "database oid", "environment" or "address"
	Recorded string `json:"recorded"`
	Found    string `json:"found"`
}

func (d Difference) String() string {
	return fmt.Sprintf("its %s is %s, recorded is %s", d.What, d.Found, d.Recorded)
}

// QuarantinedRelay is a relay that waits for a decision. It claims and sends nothing.
type QuarantinedRelay struct {
	Name        string `json:"name"`
	Reason      string `json:"reason"`
	Environment string `json:"environment"`
	Address     string `json:"address"`
}

const differentAddress = "address"

// differences returns in what respects a database, found under one address, is not the recorded
// one. What one of the two does not say makes no difference. Neither does the timeline: it changes
// when a standby takes over.
func (found Identity) differences(recorded Identity) (all []Difference) {
	number := func(what string, recorded, found int64) {
		if recorded != found && recorded != 0 && found != 0 {
			all = append(all, Difference{what, strconv.FormatInt(recorded, 10), strconv.FormatInt(found, 10)})
		}
	}
	number("system identifier", recorded.SystemIdentifier, found.SystemIdentifier)
	number("database oid", recorded.DatabaseOID, found.DatabaseOID)
	if recorded.Environment != found.Environment && recorded.Environment != "" && found.Environment != "" {
		all = append(all, Difference{"environment", strconv.Quote(recorded.Environment), strconv.Quote(found.Environment)})
	}
	for _, address := range found.Addresses {
		if !slices.Contains(recorded.Addresses, address) {
			all = append(all, Difference{differentAddress, strings.Join(recorded.Addresses, " or "), address})
		}
	}
	return all
}

// news reports whether a database that is the recorded one is known better than it is recorded.
func (found Identity) news(recorded Identity) bool {
	return recorded.SystemIdentifier == 0 && found.SystemIdentifier != 0 ||
		recorded.Timeline != found.Timeline && found.Timeline != 0 ||
		recorded.Environment == "" && found.Environment != "" ||
		!slices.Contains(recorded.Addresses, found.Addresses[0])
}

// onlyAddress reports whether nothing but the address differs: another spelling, perhaps, of the
// same place.
func onlyAddress(differences []Difference) bool {
	return len(differences) == 1 && differences[0].What == differentAddress
}

// reasonOf says in one line why a database is not the recorded one.
func reasonOf(differences []Difference) string {
	texts := make([]string, len(differences))
	for i, d := range differences {
		texts[i] = d.String()
	}
	return "this is not the database that relays were accepted on: " + strings.Join(texts, "; ")
}

// decide says what to do about a quarantine.
const decide = "nothing is claimed or sent here. If this is where relays shall work from now on, because the database has " +
	"moved, run: outbox-relay identity accept. If it is a copy, whose pending events the original delivers, run: " +
	"outbox-relay identity discard-pending"

// Address returns where a configuration leads, the same for every spelling of the same hosts.
func Address(conn *pgx.ConnConfig) string {
	hosts := []string{address(conn.Host, conn.Port)}
	for _, fallback := range conn.Fallbacks { // the other hosts, and each of them again without TLS
		hosts = append(hosts, address(fallback.Host, fallback.Port))
	}
	slices.Sort(hosts)
	return strings.Join(slices.Compact(hosts), ",") + "/" + conn.Database
}

func address(host string, port uint16) string {
	if !strings.HasPrefix(host, "/") {
		host = strings.ToLower(strings.TrimSuffix(host, "."))
	}
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// maxEnvironment is the length of an environment's name in characters at most.
const maxEnvironment = 63

// EnvironmentProblem says what is wrong with the name of an environment; empty: nothing.
func EnvironmentProblem(name string) string {
	switch {
	case len(name) > maxEnvironment:
		return fmt.Sprintf("has %d characters; write at most %d", len(name), maxEnvironment)
	case !plain.IsASCII(name) || strings.TrimSpace(name) != name:
		return "is not a name; write printable ASCII without blanks around it, such as production"
	}
	return ""
}
