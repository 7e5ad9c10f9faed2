package settings

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// MaxFile bounds the file, in bytes.
const MaxFile = 1 << 20

const (
	maxNodes    = 100_000 // values in the file; an alias counts as often as it is used
	maxProblems = 100     // after which the rest of the file is not read
)

// readFile reads the file that the flag or the variable names, or the table's file if it exists. It reports whether it could
// read all of it.
func (s *Set) readFile(from Sources, env environment) bool {
	at := Origin{source: fromFlag, name: "config"}
	name, given := from.Flags["config"]
	if !given {
		at = Origin{source: fromEnv, name: s.table.configEnv()}
		name, given = env.values[s.table.configEnv()]
	}
	if given && name == "" {
		s.Problem(at, "", "is empty; name a file, or leave it out")
		return false
	}
	if !given {
		name = s.table.File
	}
	content, _, err := readRegular(name, MaxFile)
	switch {
	case !given && errors.Is(err, fs.ErrNotExist):
		return true
	case !given && err != nil:
		at = Origin{source: fromFile, name: name}
		fallthrough
	case err != nil:
		s.Problem(at, "", "cannot read %s: %s", name, err)
		return false
	}
	s.File = name
	return s.readYAML(content, env)
}

func (s *Set) readYAML(content []byte, env environment) bool {
	content = bytes.TrimPrefix(content, []byte("\ufeff"))
	root, line, problem := parseYAML(content)
	if problem != "" {
		s.Problem(Origin{source: fromFile, name: s.File, line: line}, "", problem)
		return false
	}
	if root == nil {
		return true
	}
	r := fileReader{Set: s, env: env, budget: maxNodes}
	r.node(root, "", "", root.Line)
	return r.budget >= 0
}

// parseYAML returns the root of the only document; nil if there is nothing but comments.
func parseYAML(content []byte) (root *yaml.Node, line int, problem string) {
	switch {
	case bytes.HasPrefix(content, []byte("\xff\xfe")), bytes.HasPrefix(content, []byte("\xfe\xff")):
		return nil, 0, "is encoded in UTF-16; save it as UTF-8"
	case bytes.IndexByte(content, 0) >= 0:
		return nil, lineOf(content, bytes.IndexByte(content, 0)), "contains a NUL byte; save it as UTF-8 text"
	case !utf8.Valid(content):
		return nil, lineOf(content, invalidUTF8(content)), "is not valid UTF-8"
	}
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	var document, second yaml.Node
	if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
		return nil, 0, ""
	} else if err != nil {
		line, problem = syntaxProblem(content, err)
		return nil, line, problem
	}
	if err := decoder.Decode(&second); err == nil {
		return nil, second.Line, `begins a second document ("---"); write one`
	} else if !errors.Is(err, io.EOF) {
		line, problem = syntaxProblem(content, err)
		return nil, line, problem
	}
	return document.Content[0], 0, ""
}

var (
	yamlLine  = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)
	tabIndent = regexp.MustCompile(`(?m)^ *\t`)
)

// syntaxProblem turns an error of the YAML parser into a line and a text. The parser calls a tab a "character that cannot
// start any token".
func syntaxProblem(content []byte, err error) (line int, text string) {
	if tab := tabIndent.FindIndex(content); tab != nil && strings.Contains(err.Error(), "cannot start any token") {
		return lineOf(content, tab[0]), "is indented with a tab; YAML allows only spaces"
	}
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		line, _ = strconv.Atoi(m[1])
	}
	return line, "is not YAML: " + yamlLine.ReplaceAllString(err.Error(), "")
}

func lineOf(content []byte, offset int) int { return 1 + bytes.Count(content[:offset], []byte("\n")) }

func invalidUTF8(content []byte) int {
	for i := 0; i < len(content); {
		r, size := utf8.DecodeRune(content[i:])
		if r == utf8.RuneError && size == 1 {
			return i
		}
		i += size
	}
	return 0
}
