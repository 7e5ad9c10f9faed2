package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// process runs the program as its own process, which is killed when it does not end, and
// returns its peak of memory.
func process(t *testing.T, env []string, args ...string) (r result, peakBytes int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var stdout, stderr bytes.Buffer
	program := exec.CommandContext(ctx, os.Args[0], args...)
	program.Dir, program.Env = t.TempDir(), append([]string{asProgram + "=1"}, env...)
	program.Stdout, program.Stderr = &stdout, &stderr
	_ = program.Run()
	if ctx.Err() != nil {
		t.Errorf("%q did not end", args)
	}
	usage := program.ProcessState.SysUsage().(*syscall.Rusage)
	return result{program.ProcessState.ExitCode(), stdout.String(), stderr.String()}, usage.Maxrss << 10
}

// peakOf returns the peak of a running process's memory, in bytes.
func peakOf(t *testing.T, pid string) int64 {
	t.Helper()
	status, err := os.ReadFile("/proc/" + pid + "/status")
	pgtest.Must(t, err)
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kilobytes, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	pgtest.Must(t, err)
	return kilobytes << 10
}

// A connection string that is malformed is refused, wherever it stands, and no part of its password
// is printed, in whatever encoding: where the password of such a string ends cannot be known.
func TestSecurityMalformedConnectionStrings(t *testing.T) {
	t.Parallel()
	const head, tail = "Can4ry", "Tw33t" // of the password
	var leaks []string
	for _, part := range []string{head, tail, head + tail} {
		leaks = append(leaks, strings.ToLower(part), hex.EncodeToString([]byte(part)), strings.ToLower(strings.TrimRight(base64.StdEncoding.EncodeToString([]byte(part)), "=")))
	}
	for i, spelling := range []string{
		"Can4ryTw33t",
		"u:Can4ryTw33t@h/db",
		"postgres:/u:Can4ryTw33t@h/db",
		"postgres//u:Can4ryTw33t@h/db",
		"jdbc:postgresql://u:Can4ryTw33t@h/db",
		`"postgres://u:Can4ryTw33t@h/db"`,
		"postgres://u:Can4ry@Tw33t@h/db",
		"postgres://u:Can4ry/Tw33t@h/db",
		"postgres://u:Can4ry%Tw33t@h/db",
		"postgres://u:Can4ry\nTw33t@h/db",
		"postgres://u:Can4ry:Tw33t@h:x/db",
		"postgres://u:Can4ry%20Tw33t@h:99999/db",
		"postgres://u:Can4ryTw33t@::1/db",
		"postgres://u:Can4ryTw33t@[::1/db",
		"postgres://u:Can4ryTw33t@h/db?sslmode=Can4ry",
		"postgres://u:Can4ryTw33t@h/db?password=Tw33t&port=Tw33t",
		"host=h password=Can4ry Tw33t",
		"host=h password='Can4ryTw33t",
		"Host=h;Password=Can4ryTw33t;Database=db",
	} {
		t.Run(strconv.Itoa(i+1), func(t *testing.T) { // a name stands in the paths of files
			t.Parallel()
			file := func(format string) string {
				return writeFile(t, filepath.Join(t.TempDir(), usualFile), fmt.Sprintf(format, spelling))
			}
			const destination = "OUTBOX_DESTINATION_URL=https://logistics.internal/in"
			type place struct{ env, args []string }
			places := []place{
				{nil, []string{"config", "show", "--config", file("database: {url: %q}\n")}},
				{nil, []string{"status", "--config", file("database: {url: 'postgres://u@h/db', listen_url: %q}\n")}},
				{[]string{"OUTBOX_DATABASE_URL_FILE=" + file("%s")}, []string{"migrate", "up"}},
			}
			for _, how := range append(places, place{[]string{"OUTBOX_DATABASE_URL=" + spelling}, []string{"run", "--log-level=debug"}}) {
				r := command(append(how.env, destination), how.args...)
				if i == 0 { // libraries write to the stderr of the process itself
					r, _ = process(t, append(how.env, destination), how.args...)
				}
				printed := strings.ToLower(r.stdout + r.stderr)
				if unescaped, err := url.PathUnescape(printed); err == nil {
					printed += unescaped
				}
				if r.code != cli.ExitConfig || !strings.Contains(r.stderr, "url") && !strings.Contains(r.stderr, "URL") {
					t.Errorf("%s: exit code %d: %s", how.args[0], r.code, r.stderr)
				}
				for _, leak := range leaks {
					if strings.Contains(printed, leak) {
						t.Errorf("%s: %q is printed: %s", how.args[0], leak, printed)
					}
				}
			}
		})
	}
}

// What makes other programs eat a machine's memory is refused at once, and said in few words.
func TestSecurityYAMLBombs(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	var laughs, anchors strings.Builder
	laughs.WriteString("a0: &a0 [x,x,x,x,x,x,x,x,x]\n")
	for i := 1; i < 12; i++ {
		fmt.Fprintf(&laughs, "a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i-1), 9), ","))
	}
	for i := range 30_000 {
		fmt.Fprintf(&anchors, "k%d: &k%d v\n", i, i)
	}
	const full = settings.MaxFile - 100
	for name, file := range map[string]string{
		"billion laughs":          laughs.String() + "routes: *a11\n",
		"laughs in a destination": "x0: &x0 {url: http://a}\n" + laughsIn("destinations", 10),
		"alias of itself":         "routes: &r [*r, *r]\n",
		"alias of its parent":     "alerts: &a {channels: [*a, {slack: *a}]}\n",
		"many anchors":            anchors.String(),
		"deep closed lists":       "routes: " + strings.Repeat("[", full/2) + strings.Repeat("]", full/2),
		"deep flow maps":          strings.Repeat("{a: ", full/4),
		"deep block lists":        "routes:\n" + strings.Repeat("- ", full/2) + "x\n",
		"deep block maps":         nested(1300),
		"deep keys":               strings.Repeat("? ", full/2) + "a\n",
		"huge key":                strings.Repeat("k", full) + ": v\n",
		"huge value":              "relay: {name: " + strings.Repeat("v", full-20) + "}\n",
		"huge duration":           "relay: {lease: " + strings.Repeat("1h", full/2-20) + "}\n",
		"huge tag":                "relay: {name: !" + strings.Repeat("t", full-30) + " x}\n",
		"huge URL":                "destinations: {a: {url: 'http://" + strings.Repeat("a", full-60) + "'}}\n",
		"huge comment":            "# " + strings.Repeat("c", 2*settings.MaxFile),
		"one key, often":          strings.Repeat("log: {level: info}\n", full/19),
		"unknown keys":            unknownKeys(60_000),
		"many documents":          strings.Repeat("---\nlog: {}\n", full/12),
		"nested references":       "relay: {name: '" + strings.Repeat("${A:-", full/6) + "'}\n",
		"merge keys":              "a: &a {x: y}\nb:\n" + strings.Repeat("  <<: *a\n", 50_000),
		"entries without end":     "defaults: {retry: {schedule: [" + strings.Repeat("1s,", full/4) + "]}}\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := writeFile(t, filepath.Join(t.TempDir(), usualFile), file)
			r, peak := process(t, twoSettings[:1], "config", "check", "--config", config)
			t.Logf("%4d MiB, %6d bytes: %.200q", peak>>20, len(r.stderr), r.stderr)
			if r.code != cli.ExitConfig || !strings.Contains(r.stderr, "Nothing starts with this configuration.") {
				t.Errorf("exit code %d: %.500s", r.code, r.stderr)
			}
			// The kernel counts what this process held when it made the other one.
			if own := peakOf(t, "self"); peak > own+512<<20 {
				t.Errorf("it took %d MiB, of which at most %d are not its own", peak>>20, own>>20)
			}
			if len(r.stdout)+len(r.stderr) > 64<<10 {
				t.Errorf("it printed %d bytes", len(r.stdout)+len(r.stderr))
			}
		})
	}
}

// laughsIn builds a section out of aliases that multiply.
func laughsIn(section string, depth int) string {
	var b strings.Builder
	for i := 1; i < depth; i++ {
		fmt.Fprintf(&b, "x%d: &x%d {", i, i)
		for j := range 9 {
			fmt.Fprintf(&b, "d%d: *x%d, ", j, i-1)
		}
		b.WriteString("}\n")
	}
	fmt.Fprintf(&b, "%s: *x%d\n", section, depth-1)
	return b.String()
}

// nested returns sections within sections; its size is the square of the depth.
func nested(depth int) string {
	var b strings.Builder
	for i := range depth {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

func unknownKeys(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "key-%d: 1\n", i)
	}
	return b.String()
}
