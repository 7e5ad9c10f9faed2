package pg

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestOutcomeUnknown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"refused":    {&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "55P03"}, false},
		"terminated": {&pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "57P01"}, true},
		"cut off":    {fmt.Errorf("claim: %w", errors.New("unexpected EOF")), true},
		"timed out":  {context.DeadlineExceeded, true},
	} {
		testkit.Equal(t, name, OutcomeUnknown(c.err), c.want)
	}
}

// What passes is waited for, for ever; all else must not keep the other rows of a batch.
func TestErrorsOfTheDatabaseAreClassified(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]ErrorClass{
		"40001": ErrorPassing, "40P01": ErrorPassing, "53100": ErrorPassing, "53300": ErrorPassing, "57P01": ErrorPassing,
		"57P03": ErrorPassing, "57014": ErrorPassing, "25006": ErrorPassing, "42501": ErrorPassing, "42P01": ErrorPassing, "08006": ErrorPassing,
		"XX000": ErrorDamaged, "XX001": ErrorDamaged, "XX002": ErrorDamaged, "58030": ErrorDamaged, "54000": ErrorDamaged,
		"22003": ErrorRefused, "23514": ErrorRefused, "38000": ErrorRefused, "44000": ErrorRefused, "P0001": ErrorRefused, "55P03": ErrorRefused,
	} {
		if got := ClassifyError(fmt.Errorf("settle: %w", &pgconn.PgError{Code: code})); got != want {
			t.Errorf("%s is of class %d, want %d", code, got, want)
		}
	}
	for _, err := range []error{nil, context.DeadlineExceeded, &pgconn.PgError{Code: "bad"}} {
		if got := ClassifyError(err); got != ErrorPassing {
			t.Errorf("%v is of class %d", err, got)
		}
	}
}

// connecting returns the error of a connection to a host that is not there.
func connecting(host string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	config, err := pgconn.ParseConfig("host=" + host + " user=x sslmode=disable")
	if err != nil {
		return err
	}
	config.LookupFunc = func(_ context.Context, host string) ([]string, error) {
		if host == "db.invalid" {
			return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
		}
		return []string{host}, nil
	}
	if host == "192.0.2.1" { // which hosts without a network refuse at once
		config.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
	}
	_, err = pgconn.ConnectConfig(ctx, config)
	return err
}

// A failure that an operator can end says how; one that ends by itself says nothing.
func TestHint(t *testing.T) {
	t.Parallel()
	for want, failures := range map[string][]error{
		"":                                {nil, errors.New("unexpected EOF"), &pgconn.PgError{Code: serializationFailure}, &pgconn.PgError{Code: protocolViolation, Message: "query_wait_timeout"}},
		"target_session_attrs=read-write": {fmt.Errorf("beat: %w", ErrReadOnly), &pgconn.PgError{Code: ReadOnlyTransaction}},
		"lead to the same database":       {ErrTwoDatabases},
		"check user and password":         {&pgconn.PgError{Code: wrongPassword}, &pgconn.PgError{Code: wrongAuthorization}},
		"check the name in database.url":  {&pgconn.PgError{Code: noSuchDatabase}},
		"run migrations/roles.sql":        {&pgconn.PgError{Code: LacksPrivilege}},
		"the server is stopped":           {fmt.Errorf("connect: %w", syscall.ECONNREFUSED), connecting("/nowhere")},
		"does not resolve":                {connecting("db.invalid")},
		"does not answer":                 {connecting("192.0.2.1")},
		"stopping or starting":            {&pgconn.PgError{Code: adminShutdown}, &pgconn.PgError{Code: cannotConnectNow}},
		"a relay needs four":              {&pgconn.PgError{Code: tooManyConnections}},
		"run pg_amcheck":                  {&pgconn.PgError{Code: "XX001"}, &pgconn.PgError{Code: "58030"}},
		"does not belong to the outbox":   {&pgconn.PgError{Code: "23514"}, &pgconn.PgError{Code: "P0001"}},
		"database.listen_url past it":     {&pgconn.PgError{Code: protocolViolation, Message: "unsupported startup parameter: jit"}},
		"set database.pooler to auto":     {&pgconn.PgError{Code: protocolViolation, Message: "prepare is not allowed in statement pooling mode"}},
	} {
		for _, err := range failures {
			if got := Hint(err); !strings.Contains(got, want) || (got == "") != (want == "") {
				t.Errorf("%v: %q, want %q", err, got, want)
			}
		}
	}
}

// A refused statement names the right that was not granted: for a schema it is the owner of the
// tables that lacks it.
func TestRoleHint(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]string{
		"permission denied for schema public": "GRANT CREATE on that schema",
		"permission denied for table outbox":  "run migrations/roles.sql again",
	} {
		if err := WithRoleHint(&pgconn.PgError{Code: LacksPrivilege, Message: message}); !strings.Contains(err.Error(), want) || !HasCode(err, LacksPrivilege) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if other := errors.New("other"); !errors.Is(WithRoleHint(other), other) || WithRoleHint(nil) != nil {
		t.Error("another error is changed")
	}
}
