package settings

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

type server struct {
	timeout time.Duration
	tags    []string
	token   Secret
	delays  []time.Duration
}

type program struct {
	name, level string
	port        int
	debug       bool
	ratio       float64
	labels      map[string]string
	servers     map[string]*server
	matches     []string
}

func (p *program) rows() []Row {
	return []Row{
		{Path: "name", Flag: "name", Value: One("shop", ParseText, To(&p.name), "none")},
		{Path: "log.level", Value: One("info", ParseChoice("debug", "info", "warn", "error"), To(&p.level), "info")},
		{Path: "log.debug", Value: One("true", ParseBool, To(&p.debug))},
		{Path: "port", Flag: "port", Value: One("80", ParseCount, To(&p.port))},
		{Path: "ratio", Value: One("0.5", ParseFraction("write one from 0 to 1"), To(&p.ratio))},
		{Path: "labels.*", Value: Each("x", ParseText, To(&p.labels))},
	}
}

func matchRows(match *string) []Row {
	return []Row{{Path: "match", Entry: true, Value: One("x.*", ParseText, To(match))}, {Path: "to", Value: Many("[a]", ParseText, func([]string) {})}}
}

func (s *server) rows() []Row {
	return []Row{
		{Path: "timeout", Value: One("5s", ParseDuration, To(&s.timeout), 5*time.Second)},
		{Path: "tags", Value: Many("[a, b]", ParseText, To(&s.tags))},
		{Path: "token", FromFile: true, Value: One("secret", ParseSecret, To(&s.token))},
		{Path: "delays", Value: Many("[5s, 30s]", ParseDuration, To(&s.delays)).NotEmpty()},
	}
}

// load reads a file of that text, below an environment and flags.
func load(t *testing.T, text string, from Sources) (*program, *Set) {
	t.Helper()
	p := &program{servers: map[string]*server{}}
	file := filepath.Join(t.TempDir(), "test.yaml")
	testkit.Must(t, os.WriteFile(file, []byte(text), 0o600))
	s := p.load(file, from)
	return p, s
}

// load fills a program from a file and the sources above it.
func (p *program) load(file string, from Sources) *Set {
	shared := new(server).rows()
	s := Load(Table{Prefix: "TEST_", File: file, Rows: slices.Concat(
		p.rows(), Under("defaults", shared), Under("servers.*", Inherited(shared)), Under("rules[]", matchRows(new(string))),
	)}, from)
	s.Inherit("servers", "defaults")
	s.Bind("", p.rows())
	for _, name := range s.Children("servers") {
		p.servers[name] = &server{}
		s.Bind("servers."+name, p.servers[name].rows())
	}
	for _, rule := range s.Children("rules") {
		match := ""
		s.Bind(rule, matchRows(&match))
		p.matches = append(p.matches, match)
	}
	s.Keep()
	return s
}

// Flags win over the environment, that over the file, that over defaults. A child takes what it
// does not set from the shared section.
func TestSourcesAndInheritance(t *testing.T) {
	t.Parallel()
	p, s := load(t, "name: file\ndefaults: {timeout: 7s}\nservers: {a: {tags: [x]}, b: {timeout: 9s}}\n",
		Sources{Env: []string{"TEST_NAME=env", "TEST_DEFAULTS_TAGS=y, z", "TEST_DEFAULTS_TOKEN=hunter2"}, Flags: map[string]string{"name": "flag"}})
	testkit.Must(t, s.Err())
	a, b := p.servers["a"], p.servers["b"]
	if p.name != "flag" || a.timeout != 7*time.Second || b.timeout != 9*time.Second || !slices.Equal(a.tags, []string{"x"}) || !slices.Equal(b.tags, []string{"y", "z"}) || a.token != "hunter2" {
		t.Errorf("%s, %+v, %+v", p.name, a.tags, b.tags)
	}
	shown, err := s.Show()
	if err != nil || strings.Contains(string(shown), "hunter2") || !strings.Contains(string(shown), "name: flag # flag --name\n") ||
		!strings.Contains(string(shown), "tags: [y, z] # env TEST_DEFAULTS_TAGS\n") {
		t.Errorf("%v\n%s", err, shown)
	}
	if !s.Own("servers.b.timeout") || s.Own("servers.a.timeout") || s.Has("servers.c.timeout") {
		t.Error("the origins are wrong")
	}
}

// Each mistake names its place, what is wrong, and what to write.
func TestMistakes(t *testing.T) {
	t.Parallel()
	_, s := load(t, "nam: x\nservers:\n  a: {timeout: 7}\n", Sources{Env: []string{"TEST_DEFAULTS_TIMEOUT=x", "TEST_DEFAULTS_TOKEN=a", "TEST_DEFAULTS_TOKEN_FILE=b", "TEST_NAM=y"}})
	dir, _ := filepath.Split(s.File)
	got := strings.ReplaceAll(s.Err().Error(), dir, "")
	want := `test.yaml:1: unknown key "nam"; did you mean "name"?
test.yaml:3: servers.a.timeout: "7" has no unit; write "7s"
env TEST_DEFAULTS_TIMEOUT: "x" is not a duration; write one such as "5s", "15m" or "24h"
env TEST_DEFAULTS_TOKEN: is set, and so is TEST_DEFAULTS_TOKEN_FILE; unset one of them
4 problems. Nothing starts with this configuration.`
	if got != want {
		t.Errorf("the problems are:\n%s\nwant:\n%s", got, want)
	}
	if len(s.Warnings) != 1 || s.Warnings[0].String() != "env TEST_NAM: is not a setting of this version; did you mean TEST_NAME?" {
		t.Errorf("the warnings are %v", s.Warnings)
	}
}
