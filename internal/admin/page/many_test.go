package page

import (
	"html"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Many alerts have pages, and of a relay with many destinations some are named.
func TestPagesOfAlerts(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_alert (rule, subject) SELECT 'lag', 'd' || i FROM generate_series(0, 149) i`)
	db.Exec(`WITH r AS (INSERT INTO outbox_relay (name, version) VALUES ('r1', '1') RETURNING id)
		INSERT INTO outbox_relay_destination (relay_id, destination, settings) SELECT id, 'd' || i, '' FROM r, generate_series(0, 149) i`)
	s := serve(t, db.Pool)
	for path, want := range map[string]struct {
		alerts      int
		first, next bool
	}{"/alerts": {100, false, true}, "/alerts?skip=100": {50, true, false}, "/alerts?skip=200": {0, true, false}} {
		status, body := s.get(path)
		testkit.Equal(t, path, status, http.StatusOK)
		testkit.Equal(t, "alerts of "+path, strings.Count(body, `<li class="warning">`), want.alerts)
		testkit.Equal(t, "a link from "+path+" to the first page", strings.Contains(body, `id="first"`), want.first)
		testkit.Equal(t, "a link from "+path+" to the next page", strings.Contains(body, `id="next" href="/ops/alerts?skip=100"`), want.next)
	}
	if _, body := s.get("/relays"); !strings.Contains(body, " and 50 more</td>") {
		t.Error("the destinations of a relay are not bounded")
	}
}

// The overview of many destinations has pages, which keep the beginning of the names, the order and
// the span.
func TestPagesOfDestinations(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) SELECT 't' || i, 's' || to_char(i, 'FM000') FROM generate_series(0, 249) i`)
	s := serve(t, db.Pool)
	row, next := regexp.MustCompile(`id="to-([^"]+)"`), regexp.MustCompile(`id="next" href="/ops([^"]+)"`)
	for _, test := range []struct {
		query, keeps string
		sizes        []int
	}{
		{"", "", []int{100, 100, 51}},
		{"?prefix=s1", "prefix=s1", []int{100}},
		{"?prefix=s", "prefix=s", []int{100, 100, 50}},
		{"?prefix=s&sort=name&span=24h", "prefix=s&sort=name&span=24h", []int{100, 100, 50}},
	} {
		path, seen := "/"+test.query, map[string]bool{}
		for i, size := range test.sizes {
			status, body := s.get(path)
			rows := row.FindAllStringSubmatch(body, -1)
			if status != http.StatusOK || len(rows) != size {
				t.Fatalf("%s: %d, %d destinations, want %d", path, status, len(rows), size)
			}
			for _, match := range rows {
				seen[match[1]] = true
			}
			if first := strings.Contains(body, `id="first" href="/ops/`+html.EscapeString(test.query)+`"`); first != (i > 0) {
				t.Errorf("%s: a link to the first page: %t", path, first)
			}
			link := next.FindStringSubmatch(body)
			if (link == nil) != (i == len(test.sizes)-1) {
				t.Fatalf("%s: a link to the next page: %v", path, link)
			}
			if link != nil {
				if path = html.UnescapeString(link[1]); !strings.HasSuffix(path, test.keeps) {
					t.Errorf("the next page loses %s: %s", test.keeps, path)
				}
			}
		}
		total := 0
		for _, size := range test.sizes {
			total += size
		}
		testkit.Equal(t, "destinations on all pages of "+test.query, len(seen), total)
	}
	s.gets(200, "/?prefix=s&sort=name&span=24h&after=s099&done=x",
		`id="span-14d" href="/ops/?after=s099&amp;prefix=s&amp;sort=name&amp;span=14d"`, `<input type="hidden" name="sort" value="name">`, `<input type="hidden" name="span" value="24h">`,
		`id="all-destinations" href="/ops/?sort=name&amp;span=24h"`)
	for query, live := range map[string]bool{"": true, "?sort=pending": true, "?after=s099&sort=name": true, "?after=s099": false, "?after=s099&sort=pending": false} {
		if _, body := s.get("/" + query); strings.Contains(body, "hx-get=") != live {
			t.Errorf("%s: it updates itself: %t", query, !live)
		}
	}
	for _, column := range (overviewData{}).Columns() {
		s.gets(http.StatusOK, "/?sort="+column[0])
	}
	for query, want := range map[string]string{"after=gone": "after: no destination", "sort=gone": "sort: "} {
		s.gets(http.StatusUnprocessableEntity, "/?"+query, want)
	}
}
