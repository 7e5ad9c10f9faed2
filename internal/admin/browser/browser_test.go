package browser

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// The overview follows what happens, without a reload, and stands still while it is paused.
func TestOverviewIsLive(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (name, version) VALUES ('r1', '1'); INSERT INTO outbox_relay_destination VALUES (1, 'default')`)
	beat := func() { db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() + interval '1 hour'`) }
	beat()
	past := history.New()
	s := open(t, db, past, 1280, "light")
	s.visit("/")
	s.reads("Nothing was delivered.")
	// The first delivery is drawn at once, though no line leads there.
	past.Attempted(history.Key{Destination: "default", EventType: "t"}, policy.Delivered, 20*time.Millisecond, 30*time.Millisecond)
	relaytest.Eventually(s, "charts", func() bool { return evaluate[int](s, `document.querySelectorAll(".u-wrap").length`) == 3 })
	s.run(chromedp.Evaluate(`window.kept = true`, nil))
	db.Insert(2, "k")
	db.Settled("failed", "true")
	s.reads(`2 deliveries to "default" failed; last:`)
	if !evaluate[bool](s, `window.kept === true && document.querySelectorAll(".u-wrap").length === 3`) {
		t.Error("the page was loaded again, or its charts are gone")
	}
	db.Exec(`UPDATE outbox_delivery SET status = 'discarded'`)
	s.reads("All is well.")
}

// From a filter to a preview to a replay, by clicks.
func TestReplay(t *testing.T) {
	t.Parallel()
	db := outage(t)
	s := open(t, db, history.New(), 1280, "light")
	s.visit("/events")
	s.run(chromedp.SetValue("#f-status", "failed", chromedp.ByID), chromedp.SetValue("#f-reason", "rejected", chromedp.ByID), chromedp.Click("#apply", chromedp.ByID))
	s.reads("Replay all that match")
	s.run(chromedp.Click("#replay-all", chromedp.ByID))
	want := relaytest.Row[string](db, `SELECT 'Replay ' || count(*) || ' deliveries?' FROM outbox_delivery WHERE status = 'failed' AND last_reason = 'rejected'`)
	s.reads(want)
	s.run(chromedp.Click("#confirm", chromedp.ByID))
	s.reads("Ordered by")
	relaytest.Becomes(db, "done ann@127.0.0.1", `SELECT state || ' ' || actor FROM outbox_audit ORDER BY id DESC LIMIT 1`)
	s.reads("9 of 9 done")
	testkit.Equal(t, "left", relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed' AND last_reason = 'rejected'`), 0)
	// Two events by their boxes.
	s.visit("/events?status=failed")
	s.run(chromedp.Click("tbody tr:nth-child(1) input", chromedp.ByQuery), chromedp.Click("tbody tr:nth-child(2) input", chromedp.ByQuery), chromedp.Click("#discard-selected", chromedp.ByID))
	s.reads("Discard 2 deliveries?")
	s.run(chromedp.Click("#cancel", chromedp.ByID))
	s.reads("By key or reference")
}

// Pause and resume, and a payload that is shown only when it is asked for.
func TestPauseAndReveal(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{"a": "payload-4471<script>alert(1)</script>"}', '<img src=x onerror=alert(1)>')`)
	s := open(t, db, history.New(), 1280, "light")
	s.visit("/destinations/default")
	s.run(chromedp.SendKeys("#reason", "maintenance", chromedp.ByID), chromedp.Click("#pause", chromedp.ByID))
	s.reads(`"default" is paused (maintenance)`)
	s.run(chromedp.Click("#resume", chromedp.ByID))
	s.reads("Resumed.")
	s.visit("/events/1")
	if evaluate[bool](s, `document.documentElement.outerHTML.includes("payload-4471")`) {
		t.Error("the payload is in the page")
	}
	s.run(chromedp.Click("#reveal", chromedp.ByID))
	s.reads("payload-4471<script>")
}

// Everything can be reached by keys alone, and the focus survives an update.
func TestKeyboardOnly(t *testing.T) {
	t.Parallel()
	db := outage(t)
	s := open(t, db, history.New(), 1280, "light")
	s.visit("/")
	s.run(chromedp.KeyEvent(kb.Tab))
	testkit.Equal(t, "the first stop", evaluate[string](s, `document.activeElement.textContent`), "Skip to content")
	s.run(chromedp.KeyEvent("g"), chromedp.KeyEvent("e"))
	s.reads("By key or reference")
	s.scriptsRun()
	// Not as a KeyEvent, whose character arrives also where a script has prevented that.
	s.run(chromedp.Evaluate(`document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "/", bubbles: true, cancelable: true}))`, nil))
	testkit.Equal(t, "/ leads to", evaluate[string](s, `document.activeElement.id`), "find")
	s.run(chromedp.KeyEvent("INV-71511" + kb.Enter))
	s.reads("billing/2026/071511")
	s.visit("/events?status=failed")
	s.run(chromedp.KeyEvent("j"), chromedp.KeyEvent("j"))
	second := evaluate[string](s, `document.activeElement.id`)
	if !strings.HasPrefix(second, "row-") {
		t.Errorf("j leads to %q", second)
	}
	s.run(chromedp.Evaluate(`new Promise(done => document.body.addEventListener("htmx:afterSettle", () => done(true), {once: true}))`, nil, awaitPromise))
	if got := evaluate[string](s, `document.activeElement.id`); got != second {
		t.Errorf("an update moved the focus from %q to %q", second, got)
	}
	s.run(chromedp.KeyEvent(kb.Enter))
	s.reads("Timeline")
	s.scriptsRun() // before that no key means anything
	s.run(chromedp.KeyEvent("?"))
	s.reads("Keyboard shortcuts")
	s.run(chromedp.KeyEvent(kb.Escape), chromedp.KeyEvent("t"))
	testkit.Equal(t, "after t, the theme", evaluate[string](s, `document.documentElement.dataset.theme`), "dark")
}

// What an update brings stands where it stood: nothing jumps from under a pointer.
func TestUpdatesShiftNothing(t *testing.T) {
	t.Parallel()
	db := outage(t)
	s := open(t, db, lastHour(db), 1280, "light")
	for _, path := range []string{"/", "/events?status=failed", "/events/1301", "/destinations/crm", "/relays"} {
		s.visit(path)
		s.run(chromedp.Evaluate(`window.shift = 0; new PerformanceObserver(list => { for (const e of list.getEntries()) window.shift += e.value; }).observe({type: "layout-shift"})`, nil))
		s.run(chromedp.Evaluate(`new Promise(done => document.body.addEventListener("htmx:afterSettle", () => requestAnimationFrame(() => requestAnimationFrame(() => done(true))), {once: true}))`, nil, awaitPromise))
		if shift := evaluate[float64](s, `window.shift`); shift > 0.005 {
			t.Errorf("%s: %g of the window moved", path, shift)
		}
	}
	// The browser reports it, if something moves.
	s.run(chromedp.Evaluate(`document.getElementById("live").style.marginTop = "300px"`, nil))
	relaytest.Eventually(s, "a shift", func() bool { return evaluate[float64](s, `window.shift`) > 0.005 })
}

// The page notices that its database is gone, and that it is back.
func TestDatabaseGoesAndComesBack(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	s := open(t, db, history.New(), 1280, "light")
	s.expected = []string{"503"}
	s.visit("/")
	s.reads("No relay is running")
	db.Exec(`ALTER TABLE outbox_relay RENAME TO away`)
	s.reads("The database has another schema")
	db.Exec(`ALTER TABLE away RENAME TO outbox_relay`)
	s.reads("No relay is running")
}

// At both widths nothing is wider than the window, in light and dark. With OUTBOX_SCREENSHOTS, a
// directory, pictures are kept.
func TestPictures(t *testing.T) {
	t.Parallel()
	dir := os.Getenv("OUTBOX_SCREENSHOTS")
	for _, look := range []struct {
		name   string
		width  int64
		scheme string
	}{{"light", 1280, "light"}, {"dark", 1280, "dark"}, {"narrow-light", 390, "light"}, {"narrow-dark", 390, "dark"}} {
		db := outage(t)
		db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() + interval '1 minute'`)
		s := open(t, db, lastHour(db), look.width, look.scheme)
		s.expected = []string{"404"} // an event that is not there
		for name, path := range map[string]string{
			"overview": "/", "destination": "/destinations/crm", "events": "/events?status=failed", "event": "/events/1301", "preview": "/operations/new?action=replay&status=failed&destination=crm",
			"payload": "/events/1300", "alerts": "/alerts", "relays": "/relays", "audit": "/audit", "operation": "/operations/2", "held": "/destinations/analytics?span=14d", "day": "/?span=24h&sort=failed",
			"discard": "/operations/new?action=discard&id=1301", "retry": "/operations/new?action=retry&destination=analytics", "nowhere": "/events/99999", "list": "/events?destination=analytics",
		} {
			s.visit(path)
			if name == "payload" {
				s.run(chromedp.Click("#reveal", chromedp.ByID))
				s.reads("As it is stored")
				s.run(chromedp.Click("details.curl summary", chromedp.ByQuery))
			}
			if width := evaluate[int64](s, `document.documentElement.scrollWidth`); width > look.width {
				t.Errorf("%s, %s: %d wide", name, look.name, width)
			}
			if dir == "" {
				continue
			}
			var picture []byte
			s.run(chromedp.ActionFunc(func(ctx context.Context) (err error) {
				height := evaluateHeight(ctx)
				if err := emulation.SetDeviceMetricsOverride(look.width, height, 1, look.width < 500).Do(ctx); err != nil {
					return err
				}
				picture, err = page.CaptureScreenshot().Do(ctx)
				return err
			}))
			relaytest.Must(t, os.WriteFile(filepath.Join(dir, name+"-"+look.name+".png"), picture, 0o600))
			s.run(emulation.SetDeviceMetricsOverride(look.width, 800, 1, look.width < 500))
		}
	}
}

func evaluateHeight(ctx context.Context) (height int64) {
	_ = chromedp.Evaluate(`Math.max(document.documentElement.scrollHeight, 600)`, &height).Do(ctx)
	return min(height, 2000)
}

func awaitPromise(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }
