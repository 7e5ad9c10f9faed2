//go:build unix

package localpg

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A copy is the same cluster at another address; a standby of it becomes another timeline when it
// is promoted.
func TestCopies(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const (
		identifier = "SELECT system_identifier::text FROM pg_control_system()"
		timeline   = "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
	)
	original := start(t, Options{})
	testkit.Must(t, original.CreateDatabase(t.Context(), "app", ""))
	for name, test := range map[string]struct {
		standby  bool
		timeline string
	}{
		"backup":  {false, "00000001"},
		"standby": {true, "00000002"},
	} {
		backup, err := original.BaseBackup(t.Context(), test.standby)
		testkit.Must(t, err)
		if !strings.HasPrefix(backup, original.Dir()+"/") {
			t.Errorf("%s: %s is left behind", name, backup)
		}
		copied := start(t, Options{CopyOf: backup})
		if got := query(t, copied.DSN("app"), "SELECT pg_is_in_recovery()::text"); got != map[bool]string{true: "true", false: "false"}[test.standby] {
			t.Errorf("%s: in recovery is %s", name, got)
		}
		if test.standby {
			query(t, copied.DSN(""), "SELECT pg_promote()::text")
		}
		if got, want := query(t, copied.DSN("app"), identifier), query(t, original.DSN("app"), identifier); got != want {
			t.Errorf("%s: system identifier %s, want %s", name, got, want)
		}
		if got := query(t, copied.DSN("app"), timeline); got != test.timeline {
			t.Errorf("%s: timeline %s, want %s", name, got, test.timeline)
		}
	}
	if _, err := Start(t.Context(), Options{CopyOf: "/nonexistent"}); err == nil || !strings.Contains(err.Error(), "copy failed") {
		t.Errorf("a copy of nothing: %v", err)
	}
}

// One initdb serves many servers.
func TestDataOfAServerThatIsDown(t *testing.T) {
	t.Parallel()
	origin := start(t, Options{})
	testkit.Must(t, origin.CreateDatabase(t.Context(), "template_some", ""))
	testkit.Must(t, origin.Shutdown(t.Context()))
	data := filepath.Join(origin.Dir(), "data")
	if exists(filepath.Join(data, "postmaster.pid")) {
		t.Error("the original runs")
	}
	for range 2 {
		copied := start(t, Options{CopyOf: data})
		if err := copied.CreateDatabase(t.Context(), "some", "template_some"); err != nil {
			t.Error(err)
		}
	}
	if err := origin.Stop(); err != nil {
		t.Error(err)
	}
	wantNothingLeft(t, origin.Dir())
}
