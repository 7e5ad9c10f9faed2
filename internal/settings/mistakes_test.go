package settings

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// problemsOf returns the problems of a set as its error prints them, without the directory of its
// files.
func problemsOf(s *Set, dir string) []string {
	var lines []string
	for _, p := range s.Problems {
		lines = append(lines, strings.ReplaceAll(p.String(), dir, "DIR"))
	}
	return lines
}

func TestFileMistakes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ file, want string }{
		// The text as such.
		"UTF-16":                 {"\xff\xfel\x00o\x00g\x00", `DIR/test.yaml: is encoded in UTF-16; save it as UTF-8`},
		"UTF-16 without a mark":  {"l\x00o\x00g\x00", `DIR/test.yaml:1: contains a NUL byte; save it as UTF-8 text`},
		"Latin-1":                {"log:\n  level: caf\xe9\n", `DIR/test.yaml:2: is not valid UTF-8`},
		"tabs":                   {"log:\n\tlevel: info\n", `DIR/test.yaml:2: is indented with a tab; YAML allows only spaces`},
		"syntax":                 {"log: {level: info\n", `DIR/test.yaml:1: is not YAML: did not find expected ',' or '}'`},
		"colon in a value":       {"log:\n  level: a: b\n", `DIR/test.yaml:2: is not YAML: mapping values are not allowed in this context`},
		"second document":        {"log: {level: info}\n---\nlog: {}\n", `DIR/test.yaml:2: begins a second document ("---"); write one`},
		"broken second document": {"log: {level: info}\n---\n[", `DIR/test.yaml:3: is not YAML: did not find expected node content`},
		"a list":                 {"- log\n", `DIR/test.yaml:1: is not a section; write settings such as "database:"`},
		"a text":                 {"hello\n", `DIR/test.yaml:1: is not a section; write settings such as "database:"`},
		"unknown anchor":         {"log: *x\n", `DIR/test.yaml: is not YAML: unknown anchor 'x' referenced`},
		"tag":                    {"log: {level: !!str info}\n", `DIR/test.yaml:1: log.level: has a tag ("!!str"); remove it`},
		"tag on a section":       {"log: !x {}\n", `DIR/test.yaml:1: log: has a tag ("!x"); remove it`},
		"merge key": {
			"defaults: &d {timeout: 5s}\nservers:\n  a:\n    <<: *d\n",
			`DIR/test.yaml:4: servers.a: merge keys ("<<") are not supported; write what destinations share under defaults`,
		},
		"a key that is a list":      {"? [a]\n: b\n", `DIR/test.yaml:1: has a key that is not a name`},
		"more than a file can hold": {strings.Repeat("# comment\n", 1_700_000), `DIR/test.yaml: cannot read DIR/test.yaml: it is larger than 16384 KiB`},
		"aliases that multiply": {
			"name: x\nrules:\n- &r {match: x, to: [" + strings.Repeat("a,", 1000) + "]}\n" + strings.Repeat("- *r\n", 1000),
			`DIR/test.yaml:3: has aliases that stand for more than 100000 values, counting each as often as it is used`,
		},

		// Keys.
		"unknown key":                    {"defaults: {timout: 5s}\n", `DIR/test.yaml:1: unknown key "defaults.timout"; did you mean "timeout"?`},
		"unknown key without a likeness": {"log: {colour: blue}\n", `DIR/test.yaml:1: unknown key "log.colour"`},
		"a key in the wrong section":     {"timeout: 5s\n", `DIR/test.yaml:1: unknown key "timeout"; did you mean "defaults.timeout"?`},
		"a key with control characters":  {"\"a\\x1b[31m\": 1\n", `DIR/test.yaml:1: unknown key "a\x1b[31m"`},
		"a key of a list's syntax":       {"rules:\n- {\"[]\": x, match: a}\n", `DIR/test.yaml:2: unknown key "rules[0].[]"`},
		"a repeated key":                 {"log: {level: info}\nname: x\nlog: {}\n", `DIR/test.yaml:3: log: stands here a second time; the first is in line 1`},
		"a repeated name":                {"servers:\n  a: {timeout: 1s}\n  a: {timeout: 2s}\n", `DIR/test.yaml:3: servers.a: stands here a second time; the first is in line 2`},

		// Types.
		"a section that is a text":  {"log: info\n", `DIR/test.yaml:1: log: is not a section; write its settings on the lines below it, indented`},
		"a section that is a list":  {"servers:\n- a\n", `DIR/test.yaml:1: servers: is not a section; write its settings on the lines below it, indented`},
		"a list that is a section":  {"rules: {match: a}\n", `DIR/test.yaml:1: rules: is not a list; write entries that begin with "- "`},
		"a list that is a value":    {"rules:\n- {match: a, to: b}\n", `DIR/test.yaml:2: rules[0].to: is not a list; write one such as [a]`},
		"a value that is a list":    {"log: {level: [info]}\n", `DIR/test.yaml:1: log.level: is not a single value; write one such as info`},
		"a value that is a section": {"defaults: {timeout: {seconds: 5}}\n", `DIR/test.yaml:1: defaults.timeout: is not a single value; write one such as 5s`},
		"an item that is a list":    {"defaults: {delays: [[5s]]}\n", `DIR/test.yaml:1: defaults.delays[0]: is not a single value`},
		"a value left out":          {"defaults:\n  timeout:\nname: x\n", `DIR/test.yaml:2: defaults.timeout: has no value; write one such as 5s, or remove the key`},
		"an item left out":          {"defaults:\n  delays:\n  - 5s\n  -\n", `DIR/test.yaml:4: defaults.delays[1]: has no value`},
		"an empty list":             {"defaults: {delays: []}\n", `DIR/test.yaml:1: defaults.delays: is an empty list; write one such as [5s, 30s], or remove the key`},
		"a word for a number":       {"port: ten\n", `DIR/test.yaml:1: port: "ten" is not a whole number`},
		"a fraction for a number":   {"port: 1.5\n", `DIR/test.yaml:1: port: "1.5" is not a whole number`},
		"a number beyond":           {"port: 99999999999\n", `DIR/test.yaml:1: port: "99999999999" is not a whole number`},
		"no number":                 {"port: ''\n", `DIR/test.yaml:1: port: is empty; write a whole number`},
		"zero for a number":         {"port: 0\n", `DIR/test.yaml:1: port: "0" is too small; write 1 or more`},
		"a negative number":         {"port: -1\n", `DIR/test.yaml:1: port: "-1" is too small; write 1 or more`},
		"a fraction without end":    {"ratio: .inf\n", `DIR/test.yaml:1: ratio: ".inf" is not a number; write one from 0 to 1`},
		"yes for true":              {"log: {debug: yes}\n", `DIR/test.yaml:1: log.debug: "yes" is neither true nor false`},
		"a control character":       {"name: \"a\\nb\"\n", `DIR/test.yaml:1: name: contains a control character, such as a line break`},
		"a label that is empty":     {"labels:\n  a: x\n  b: ''\n", `DIR/test.yaml:3: labels.b: is empty`},
		"a choice misspelled":       {"log: {level: inof}\n", `DIR/test.yaml:1: log.level: "inof" is not known; did you mean "info"?`},
		"a choice without likeness": {"log: {level: loud}\n", `DIR/test.yaml:1: log.level: "loud" is not known; write one of debug, info, warn, error`},

		// Durations.
		"no unit":             {"\ndefaults:\n\n  timeout: 30\n", `DIR/test.yaml:4: defaults.timeout: "30" has no unit; write "30s"`},
		"no unit, as a text":  {"defaults: {timeout: '30'}\n", `DIR/test.yaml:1: defaults.timeout: "30" has no unit; write "30s"`},
		"no unit, in a list":  {"defaults:\n  delays:\n  - 5s\n  - 30\n", `DIR/test.yaml:4: defaults.delays[1]: "30" has no unit; write "30s"`},
		"a blank":             {"defaults: {timeout: 60 s}\n", `DIR/test.yaml:1: defaults.timeout: "60 s" is not a duration; write "60s"`},
		"an upper-case unit":  {"defaults: {timeout: 60S}\n", `DIR/test.yaml:1: defaults.timeout: "60S" is not a duration; write "60s"`},
		"days":                {"defaults: {delays: [5s, 3d]}\n", `DIR/test.yaml:1: defaults.delays[1]: "3d" uses a unit longer than hours; write "72h"`},
		"weeks":               {"defaults: {timeout: 2w}\n", `DIR/test.yaml:1: defaults.timeout: "2w" uses a unit longer than hours; write "336h"`},
		"for ever":            {"defaults: {timeout: ∞}\n", `DIR/test.yaml:1: defaults.timeout: "∞" is not a duration; write one such as "5s", "15m" or "24h"`},
		"an empty text":       {"defaults: {timeout: ''}\n", `DIR/test.yaml:1: defaults.timeout: is empty; write a duration such as "5s"`},
		"zero":                {"defaults: {timeout: 0s}\n", `DIR/test.yaml:1: defaults.timeout: "0s" is not more than zero; write a duration such as "5s"`},
		"a negative duration": {"defaults: {timeout: -15m}\n", `DIR/test.yaml:1: defaults.timeout: "-15m" is not more than zero; write a duration such as "5s"`},
		"an overflow":         {"defaults: {timeout: 9999999h}\n", `DIR/test.yaml:1: defaults.timeout: "9999999h" is too long; the longest duration is 2562047h`},

		// References.
		"an unset variable": {"\nname: ${POD}\n", `DIR/test.yaml:2: name: ${POD} is not set; set POD, or write ${POD:-default}`},
		"an empty variable": {"name: a-${EMPTY}\n", `DIR/test.yaml:1: name: ${EMPTY} is empty; write ${EMPTY:-} if that is meant`},
		"an open reference": {"name: ${POD\n", `DIR/test.yaml:1: name: has "${" without "}"; write $$ for a dollar sign`},
		"no reference":      {"name: ${a b}\n", `DIR/test.yaml:1: name: has a ${…} that names no variable; write ${NAME}, or $$ for a dollar sign`},
	} {
		_, s := load(t, test.file, Sources{Env: []string{"EMPTY="}})
		dir := strings.TrimSuffix(s.table.File, "/test.yaml")
		if got := strings.Join(problemsOf(s, dir), "\n"); got != test.want {
			t.Errorf("%s: the problems are:\n%s\nwant:\n%s", name, got, test.want)
		}
	}
}

// A file with many mistakes does not fill the screen.
func TestManyMistakesEndTheReading(t *testing.T) {
	t.Parallel()
	_, s := load(t, strings.Repeat("? [a]\n: b\n", 500), Sources{})
	if n := len(s.Problems); n != maxProblems+1 || !strings.Contains(s.Err().Error(), "was read up to here; correct these problems first") || s.Readable {
		t.Errorf("%d problems, the last is %s", n, s.Problems[n-1])
	}
}

func TestEnvironmentAndFlagMistakes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{"empty": "\n", "secret": "hunter2\n"} {
		testkit.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	testkit.Must(t, syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	const broken = "name: ${TEST_DEFAULTS_TOKEN}\n"
	for name, test := range map[string]struct {
		file  string
		env   string
		flags map[string]string
		want  []string
	}{
		"empty":                {env: "TEST_DEFAULTS_TIMEOUT=", want: []string{`env TEST_DEFAULTS_TIMEOUT: is set but empty; unset it or give it a value`}},
		"a wrong list":         {env: "TEST_DEFAULTS_DELAYS=5s,,30", want: []string{`env TEST_DEFAULTS_DELAYS: entry 2: is empty; write a duration such as "5s"`, `env TEST_DEFAULTS_DELAYS: entry 3: "30" has no unit; write "30s"`}},
		"a value and a file":   {env: "TEST_DEFAULTS_TOKEN=x TEST_DEFAULTS_TOKEN_FILE=DIR/secret", want: []string{`env TEST_DEFAULTS_TOKEN: is set, and so is TEST_DEFAULTS_TOKEN_FILE; unset one of them`}},
		"a file that is gone":  {env: "TEST_DEFAULTS_TOKEN_FILE=DIR/none", want: []string{`env TEST_DEFAULTS_TOKEN_FILE: cannot read DIR/none: no such file or directory`}},
		"a file without name":  {env: "TEST_DEFAULTS_TOKEN_FILE=", want: []string{`env TEST_DEFAULTS_TOKEN_FILE: is set but empty; unset it or name a file`}},
		"a file that is empty": {env: "TEST_DEFAULTS_TOKEN_FILE=DIR/empty", want: []string{`env TEST_DEFAULTS_TOKEN_FILE: DIR/empty is empty`}},
		"a directory":          {env: "TEST_DEFAULTS_TOKEN_FILE=DIR", want: []string{`env TEST_DEFAULTS_TOKEN_FILE: cannot read DIR: it is a directory`}},
		"a FIFO":               {env: "TEST_DEFAULTS_TOKEN_FILE=DIR/fifo", want: []string{`env TEST_DEFAULTS_TOKEN_FILE: cannot read DIR/fifo: it is not a regular file`}},
		"a reference to what is broken": {file: broken, env: "TEST_DEFAULTS_TOKEN_FILE=DIR/none", want: []string{
			`DIR/test.yaml:1: name: ${TEST_DEFAULTS_TOKEN} has its own problem`, `env TEST_DEFAULTS_TOKEN_FILE: cannot read DIR/none: no such file or directory`,
		}},
		"a reference to a file that is gone": {file: "name: ${SHOP}\n", env: "SHOP_FILE=DIR/none", want: []string{`DIR/test.yaml:1: name: ${SHOP}: SHOP_FILE: cannot read DIR/none: no such file or directory`}},
		"a default for a file that is gone":  {file: "name: ${SHOP:-x}\n", env: "SHOP_FILE=DIR/none", want: []string{`DIR/test.yaml:1: name: ${SHOP}: SHOP_FILE: cannot read DIR/none: no such file or directory`}},
		"a reference to an empty file":       {file: "name: ${SHOP}\n", env: "SHOP_FILE=DIR/empty", want: []string{`DIR/test.yaml:1: name: ${SHOP}: SHOP_FILE: DIR/empty is empty`}},
		"a configuration that is gone":       {env: "TEST_CONFIG=DIR/none", want: []string{`env TEST_CONFIG: cannot read DIR/none: no such file or directory`}},
		"a configuration without name":       {env: "TEST_CONFIG=", want: []string{`env TEST_CONFIG: is empty; name a file, or leave it out`}},
		"a configuration that is a FIFO":     {flags: map[string]string{"config": "DIR/fifo"}, want: []string{`flag --config: cannot read DIR/fifo: it is not a regular file`}},
		"a configuration that never ends":    {flags: map[string]string{"config": "/dev/zero"}, want: []string{`flag --config: cannot read /dev/zero: it is not a regular file`}},
		"a configuration of files":           {flags: map[string]string{"config": "DIR"}, want: []string{`flag --config: cannot read DIR: it is a directory`}},
		"an empty flag":                      {flags: map[string]string{"name": ""}, want: []string{`flag --name: is empty`}},
		"a flag's number":                    {flags: map[string]string{"port": "0"}, want: []string{`flag --port: "0" is too small; write 1 or more`}},
		"all sources at once": {file: "log: {level: loud}\n", env: "TEST_DEFAULTS_TIMEOUT=5", flags: map[string]string{"port": "x"}, want: []string{
			`DIR/test.yaml:1: log.level: "loud" is not known; write one of debug, info, warn, error`, `env TEST_DEFAULTS_TIMEOUT: "5" has no unit; write "5s"`, `flag --port: "x" is not a whole number`,
		}},
	} {
		file := filepath.Join(dir, "test.yaml")
		testkit.Must(t, os.WriteFile(file, []byte(test.file), 0o600))
		from := Sources{Env: strings.Fields(strings.ReplaceAll(test.env, "DIR", dir)), Flags: map[string]string{}}
		for flag, text := range test.flags {
			from.Flags[flag] = strings.ReplaceAll(text, "DIR", dir)
		}
		s := (&program{servers: map[string]*server{}}).load(file, from)
		if got := problemsOf(s, dir); !slices.Equal(got, test.want) {
			t.Errorf("%s: the problems are:\n%s\nwant:\n%s", name, strings.Join(got, "\n"), strings.Join(test.want, "\n"))
		}
	}
}

// A file that a variable names follows a reload; the variable itself, which wins, cannot.
func TestReferencesReadFiles(t *testing.T) {
	t.Parallel()
	secret := filepath.Join(t.TempDir(), "secret")
	for _, c := range []struct{ content, file, env, want string }{
		{"one\n", "name: a-${SHOP}\n", "", "a-one"},
		{"two\n", "name: a-${SHOP}\n", "", "a-two"},
		{"two\n", "name: a-${SHOP:-none}\n", "", "a-two"},
		{"two\n", "name: a-${SHOP}\n", "SHOP=three", "a-three"},
	} {
		testkit.Must(t, os.WriteFile(secret, []byte(c.content), 0o600))
		p, s := load(t, c.file, Sources{Env: []string{"SHOP_FILE=" + secret, c.env}})
		if err := s.Err(); err != nil || p.name != c.want {
			t.Errorf("%+v: %q, %v", c, p.name, err)
		}
	}
}

// What a file may look like and still mean the same.
func TestTolerance(t *testing.T) {
	t.Parallel()
	for name, file := range map[string]string{
		"byte order mark":   "\ufefflog: {level: warn}\n",
		"CRLF":              "log:\r\n  level: warn\r\n",
		"one document":      "---\nlog: {level: warn}\n...\n",
		"comments":          "# x\n\n---\n# y\nlog: {level: warn} # z\n",
		"quotes":            "\"log\": {'level': \"warn\"}\n",
		"alias":             "name: &x warn\nlog: {level: *x}\n",
		"empty sections":    "servers:\ndefaults: {}\nrules:\nlog: {level: warn}\n",
		"reference":         "log: {level: '${LEVEL}'}\n",
		"default":           "log: {level: '${NONE:-warn}'}\n",
		"default for empty": "log: {level: '${EMPTY:-warn}'}\n",
		"part":              "log: {level: 'w${PART}n'}\n",
	} {
		p, s := load(t, file, Sources{Env: []string{"LEVEL=warn", "PART=ar", "EMPTY="}})
		if err := s.Err(); err != nil || p.level != "warn" || !s.Readable {
			t.Errorf("%s: log.level is %q, error %v", name, p.level, err)
		}
	}
	_, s := load(t, "# nothing\n", Sources{})
	if err := s.Err(); err != nil || !s.Readable {
		t.Errorf("a file of comments: %v", err)
	}
	absent := (&program{servers: map[string]*server{}}).load(filepath.Join(t.TempDir(), "none.yaml"), Sources{})
	if err := absent.Err(); err != nil || absent.File != "" {
		t.Errorf("the usual file is absent: %v", err)
	}
}

func TestWarnings(t *testing.T) {
	t.Parallel()
	open := filepath.Join(t.TempDir(), "secret")
	testkit.Must(t, os.WriteFile(open, []byte("hunter2\r\n"), 0o600))
	testkit.Must(t, os.Chmod(open, 0o644))
	for name, test := range map[string]struct{ env, file, want string }{
		"unknown variable":               {env: "TEST_DEFAULTS_TIMOUT=1m", want: "env TEST_DEFAULTS_TIMOUT: is not a setting of this version; did you mean TEST_DEFAULTS_TIMEOUT?"},
		"no likeness":                    {env: "TEST_FROBNICATE=1", want: "env TEST_FROBNICATE: is not a setting of this version"},
		"readable by all":                {env: "TEST_DEFAULTS_TOKEN_FILE=" + open, want: "env TEST_DEFAULTS_TOKEN_FILE: " + open + " is readable by everyone on this machine; run: chmod o-r " + open},
		"a variable the file refers to":  {env: "TEST_SHOP=x", file: "name: ${TEST_SHOP}\n"},
		"a file that is referred to":     {env: "TEST_SHOP_FILE=" + open, file: "name: ${TEST_SHOP}${TEST_SHOP}\n", want: "env TEST_SHOP_FILE: " + open + " is readable by everyone on this machine; run: chmod o-r " + open},
		"what Kubernetes sets by itself": {env: "TEST_RELAY_SERVICE_HOST=x TEST_RELAY_PORT=tcp://x TEST_RELAY_PORT_80_TCP_ADDR=x TEST_RELAY_SERVICE_PORT_HTTP=80"},
		"other programs' variables":      {env: "TESTS=1 TIMEOUT=1"},
	} {
		_, s := load(t, test.file, Sources{Env: strings.Fields(test.env)})
		got := ""
		for _, w := range s.Warnings {
			got += w.String()
		}
		if err := s.Err(); err != nil || got != test.want {
			t.Errorf("%s: %v, warned %q, want %q", name, err, got, test.want)
		}
	}
	_, s := load(t, "port: 1\n", Sources{})
	s.WarnReadable("port", open)
	s.WarnReadable("port", open+".none")
	if len(s.Warnings) != 1 || !strings.Contains(s.Warnings[0].String(), "test.yaml:1: port: "+open+" is readable by everyone") {
		t.Errorf("%v", s.Warnings)
	}
}

// A variable of a list replaces the file's entries that have the same key.
func TestListsFromTheEnvironment(t *testing.T) {
	t.Parallel()
	const file = "rules: [{match: a}, {to: [b]}]\nlabels: {x: y}\n"
	p, s := load(t, file, Sources{})
	if err := s.Err(); err != nil || !slices.Equal(p.matches, []string{"a", ""}) || p.labels["x"] != "y" || s.Given("name") || !s.Given("labels.x") {
		t.Errorf("%v, %q, %q", err, p.matches, p.labels)
	}
	p, s = load(t, file, Sources{Env: []string{"TEST_RULES_MATCH=c"}})
	if err := s.Err(); err != nil || !slices.Equal(p.matches, []string{"", "c"}) {
		t.Errorf("%v, %q", err, p.matches)
	}
	shown, err := s.Show()
	for _, want := range []string{"labels:\n  x: y # ", "rules:\n  - to: [b] # ", "  - match: c # env TEST_RULES_MATCH\n", "timeout: 5s # default\n"} {
		if err != nil || !strings.Contains(string(shown), want) {
			t.Errorf("%v: %q is not in\n%s", err, want, shown)
		}
	}
	for want, d := range map[string]time.Duration{"5m": 5 * time.Minute, "1h": time.Hour, "1h0m5s": time.Hour + 5*time.Second, "1h5m": time.Hour + 5*time.Minute} {
		if got := ShortDuration(d); got != want {
			t.Errorf("%s is written %s", d, got)
		}
	}
}

// A later check names the place of a value, and does not repeat what was reported.
func TestLaterChecks(t *testing.T) {
	t.Parallel()
	_, s := load(t, "defaults: {timeout: 7}\nservers:\n  a: {tags: [x]}\n", Sources{})
	for path, want := range map[string]bool{"defaults.timeout": true, "defaults.timeout.x": true, "defaults.tags": false, "name": false} {
		if s.Failed(path) != want {
			t.Errorf("%s has failed: %t", path, !want)
		}
	}
	if !s.FailedBelow("defaults") || s.FailedBelow("servers") {
		t.Error("it does not know in which section the mistake is")
	}
	s.ProblemAt("servers.a.tags", "is wrong")
	s.ProblemAt("servers.a.none", "is missing")
	s.ProblemAt("elsewhere", "is missing")
	want := []string{
		`DIR/test.yaml:1: defaults.timeout: "7" has no unit; write "7s"`, "DIR/test.yaml:3: servers.a.tags: is wrong",
		"DIR/test.yaml:3: servers.a.none: is missing", "elsewhere: is missing",
	}
	if got := problemsOf(s, filepath.Dir(s.File)); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if s.Keep("servers"); len(s.Problems) != 2 {
		t.Errorf("kept %v", s.Problems)
	}
}
