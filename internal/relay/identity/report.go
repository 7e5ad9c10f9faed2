package identity

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// Report compares a database with what relays were accepted on.
type Report struct {
	// Recorded is nil as long as no relay has worked here.
	Recorded *Identity `json:"recorded"`
	// Found is the database as this connection sees it. Its environment and address are those of
	// who asks.
	Found       Identity     `json:"found"`
	Differences []Difference `json:"differences"`
	// Foreign says why the transaction ids in the tables are not this server's, so that no relay
	// takes events; empty: they are.
	Foreign string `json:"foreign,omitempty"`
	// Quarantined relays run and wait for a decision.
	Quarantined []QuarantinedRelay `json:"quarantined"`
	// Working relays, by name, deliver from this very database.
	Working []string `json:"working"`
}

// Reason says in one line why no relay does anything here; empty: relays may work. Neither a relay
// that is quarantined beside others that work, nor the address of a person who asks from elsewhere,
// is a reason.
func (r Report) Reason() string {
	switch {
	case len(r.Quarantined) > 0 && len(r.Working) == 0:
		return r.Quarantined[0].Reason
	case r.Foreign != "":
		return r.Foreign
	case len(r.Differences) == 0 || onlyAddress(r.Differences) || len(r.Working) > 0:
		return ""
	}
	return reasonOf(r.Differences)
}

// Errors of decisions about a database's identity.
var (
	// ErrInUse says that relays work on this database, which the decision would stop, or whose
	// events it would give up.
	ErrInUse = errors.New("relays work on this database")
	// ErrNotQuarantined says that there is nothing to decide: this is the recorded database.
	ErrNotQuarantined = errors.New("this is the database that relays were accepted on")
	// ErrEnvironments says that the relays that wait do not agree on the environment.
	ErrEnvironments = errors.New("the relays that wait name different environments")
)

// Acceptable returns what accepting would record. For the relays that wait these are their
// addresses and environment; if none does, those of who asks.
func (r Report) Acceptable() (Identity, error) {
	id := r.Found
	var environments []string
	if len(r.Quarantined) > 0 {
		id.Addresses = nil
		for _, q := range r.Quarantined {
			environments = append(environments, q.Environment)
			if id.Environment == "" || q.Environment == "" || q.Environment == id.Environment {
				id.Addresses = append(id.Addresses, q.Address)
			}
		}
		if len(id.Addresses) == 0 {
			id.Addresses = r.Found.Addresses
		}
	}
	if id.Environment == "" {
		slices.Sort(environments)
		environments = slices.DeleteFunc(slices.Compact(environments), func(name string) bool { return name == "" })
		switch {
		case len(environments) > 1:
			return Identity{}, fmt.Errorf("%w (%s); set environment to the one that shall work here", ErrEnvironments, strings.Join(environments, ", "))
		case len(environments) == 1:
			id.Environment = environments[0]
		case r.Recorded != nil:
			id.Environment = r.Recorded.Environment
		}
	}
	if r.Recorded != nil && len(r.Working) > 0 {
		if id.Environment != r.Recorded.Environment && r.Recorded.Environment != "" {
			return Identity{}, fmt.Errorf("%w (%s) as environment %q, and would stop; stop them first, or configure environment %q",
				ErrInUse, strings.Join(r.Working, ", "), r.Recorded.Environment, r.Recorded.Environment)
		}
		id.Addresses = append(slices.Clone(r.Recorded.Addresses), id.Addresses...) // theirs stay good
	}
	slices.Sort(id.Addresses)
	id.Addresses = slices.Compact(id.Addresses)
	id.Addresses = id.Addresses[max(0, len(id.Addresses)-maxAddresses):]
	return id, nil
}

// Discardable returns nil if what is pending may be given up because the original delivers it:
// relays are quarantined here, or the database is plainly another one. An unknown address alone may
// be that of a person who looks at the original from elsewhere.
func (r Report) Discardable() error {
	switch {
	case len(r.Working) > 0:
		return fmt.Errorf("%w (%s), and deliver what is pending", ErrInUse, strings.Join(r.Working, ", "))
	case len(r.Quarantined) > 0:
		return nil
	case r.Foreign != "":
		return nil
	case r.Recorded == nil:
		return fmt.Errorf("%w: no relay has worked here yet", ErrNotQuarantined)
	case len(r.Differences) == 0:
		return ErrNotQuarantined
	case onlyAddress(r.Differences):
		return fmt.Errorf("%w, as far as can be seen: only the address differs, and no relay is quarantined here; start the relay first", ErrNotQuarantined)
	}
	return nil
}

// Compare returns what a database is and what is recorded of it, for a relay of the given
// environment that reaches it by the given [Address].
func Compare(ctx context.Context, db pg.DB, address, environment string) (r Report, err error) {
	f, err := readFacts(ctx, db)
	if err != nil {
		return Report{}, err
	}
	r.Recorded, r.Found = f.recorded, f.Identity
	r.Found.Environment, r.Found.Addresses = environment, []string{address}
	r.Differences = []Difference{}
	if r.Recorded != nil {
		r.Differences = append(r.Differences, r.Found.differences(*r.Recorded)...)
	}
	foreign, err := checkOrigin(ctx, db)
	if err != nil {
		return Report{}, err
	}
	if foreign != nil && !foreign.IsFailover() { // relays accept a failover by themselves
		r.Foreign = foreign.Error()
	}
	if r.Quarantined, err = quarantinedRelays(ctx, db); err != nil {
		return Report{}, err
	}
	if r.Working, err = workingRelays(ctx, db); err != nil {
		return Report{}, err
	}
	return r, nil
}

// Accept makes a database, as Acceptable describes it, the one that relays work on. Those that wait
// begin within seconds. Before, it lets them take events: see [Rebase]. within runs the statement
// that accepts, such as in a transaction; nil: on db.
func Accept(ctx context.Context, db pg.DB, address, environment string, within func(accept func(pg.DB) error) error) (Identity, error) {
	r, err := Compare(ctx, db, address, environment)
	if err != nil {
		return Identity{}, err
	}
	id, err := r.Acceptable()
	if err != nil {
		return Identity{}, err
	}
	if _, err := Rebase(ctx, db, nil); err != nil {
		return Identity{}, err
	}
	accept := func(db pg.DB) error { return acceptIdentity(ctx, db, id) }
	if within == nil {
		return id, accept(db)
	}
	return id, within(accept)
}
