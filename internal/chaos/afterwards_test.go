package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// What a relay may have once it has nothing to do.
const (
	mostFiles   = 100 // 64 of them for requests: idle connections end after 90 s; measured: 76
	mostThreads = 20  // measured: 8
	mostMiB     = 80  // measured: 31
	mostOpen    = 4   // connections to its database
)

// selectStray selects transactions that a relay keeps open, and relays' connections beyond what $1
// relays may have.
const selectStray = `
SELECT format('%s is in a transaction since %s: %s', application_name, now() - xact_start, query) FROM pg_stat_activity
WHERE application_name LIKE 'outbox-relay%' AND state LIKE 'idle in transaction%' AND now() - state_change > interval '1 s'
UNION ALL SELECT format('relays have %s connections', count(*)) FROM pg_stat_activity WHERE application_name LIKE 'outbox-relay%' HAVING count(*) > $1`

// afterwards checks what relays still have when faults are over and everything is delivered, that
// their metrics say what the tables hold, and that their logs hold no secret and no error that is a
// relay's own.
func (s *stage) afterwards() {
	s.t.Helper()
	var wrong []string
	if err := s.Poll(drainPatience, "relays to come to rest", func(context.Context) (bool, error) {
		wrong = all(s, s.outbox, selectStray, pgx.RowTo[string], mostOpen*len(s.relays))
		for _, r := range s.relays {
			wrong = slices.Concat(wrong, s.excess(r), s.wrongMetrics(r))
		}
		return len(wrong) == 0, nil
	}); err != nil {
		s.t.Errorf("%v: %s", err, strings.Join(wrong, "; "))
	}
	s.must(fs.WalkDir(os.DirFS(s.logs), ".", func(path string, _ fs.DirEntry, err error) error {
		if log, unread := os.ReadFile(filepath.Join(s.logs, path)); unread == nil {
			for what, text := range map[string]string{"the signing secret": s.Secret, "a payload": canary} {
				if strings.Contains(string(log), text) {
					s.t.Errorf("the log %s holds %s", path, what)
				}
			}
			for _, line := range mistaken.FindAll(log, 5) {
				s.t.Errorf("%s sent a statement that no server takes: %s", path, line)
			}
		}
		return err
	}))
}

// mistaken matches errors that no fault makes: of data that a statement cannot have, and of what is
// no statement.
var mistaken = regexp.MustCompile(`(?m)^.*\(SQLSTATE (22|42)\w{3}\).*$`)

var inStatus = regexp.MustCompile(`(?m)^(Threads|VmRSS):\s+(\d+)`)

// excess returns what a relay has too much of.
func (s *stage) excess(r *relay) (all []string) {
	if runtime.GOOS != "linux" {
		return nil
	}
	life, p := r.Current()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID))
	s.must(err)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID))
	s.must(err)
	has := map[string]int{"descriptors": len(files)}
	for _, m := range inStatus.FindAllStringSubmatch(string(status), -1) {
		has[m[1]], _ = strconv.Atoi(m[2]) // digits alone
	}
	for what, most := range map[string]int{"descriptors": mostFiles, "Threads": mostThreads, "VmRSS": mostMiB << 10} {
		if has[what] > most {
			all = append(all, fmt.Sprintf("%s has %d of %s, more than %d", life, has[what], what, most))
		}
	}
	return all
}

var gauge = regexp.MustCompile(`(?m)^outbox_(backlog|failed)_deliveries\{destination="default"\} (\d+)`)

// wrongMetrics returns what a relay says about deliveries, and the tables do not. Its sample may be
// older than they are, and its counts are bounded.
func (s *stage) wrongMetrics(r *relay) (wrong []string) {
	if *age > 0 {
		return nil
	}
	life, _ := r.Current()
	log, err := os.Open(filepath.Join(s.logs, life+".log"))
	s.must(err)
	defer log.Close()
	var starting struct{ Metrics string }
	s.must(json.NewDecoder(log).Decode(&starting))
	answer, err := (&http.Client{Transport: &s.wire.transport}).Get("http://" + starting.Metrics + "/metrics")
	s.must(err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	s.must(err)
	said := map[string]string{}
	for _, m := range gauge.FindAllStringSubmatch(string(text), -1) {
		said[m[1]] = m[2]
	}
	for name, status := range map[string]string{"backlog": "pending", "failed": "failed"} {
		if n := all(s, s.outbox, `SELECT count(*)::text FROM outbox_delivery WHERE destination = 'default' AND status = $1`, pgx.RowTo[string], status)[0]; said[name] != n {
			wrong = append(wrong, fmt.Sprintf("%s says that %s are %q, and the table has %s", life, name, said[name], n))
		}
	}
	return wrong
}
