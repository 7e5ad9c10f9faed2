package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// MaxFile bounds the file, in bytes.
const MaxFile = 16 << 20

// A file is refused before its tree is built when that could have more than maxParsed nodes, of
// some 200 bytes each.
const (
	maxParsed   = 3_000_000
	maxNodes    = 1_000_000 // values in the file
	maxAliased  = 100_000   // values that aliases stand for, as often as they are used
	maxProblems = 100       // after which the rest of the file is not read
)

// readFile reads the file that the flag or the variable names, or the table's file if it exists. It
// reports whether it could read all of it.
func (s *Set) readFile(from Sources, env environment) bool {
	at, name := Origin{source: fromFile, name: s.table.File}, s.table.File
	if v := env[s.table.configEnv()]; v != nil {
		at, name = v.origin(), v.value
	}
	if file, given := from.Flags["config"]; given {
		at, name = Origin{source: fromFlag, name: "config"}, file
	}
	if name == "" {
		s.Problem(at, "", "is empty; name a file, or leave it out")
		return false
	}
	content, mode, err := readRegular(name, MaxFile)
	switch {
	case at.source == fromFile && errors.Is(err, fs.ErrNotExist):
		return true
	case err != nil:
		s.Problem(at, "", "cannot read %s: %s", name, err)
		return false
	}
	s.File = name
	root, line, problem := parseYAML(bytes.TrimPrefix(content, []byte("\ufeff")))
	if problem != "" {
		s.Problem(Origin{source: fromFile, name: name, line: line}, "", problem)
		return false
	}
	r := fileReader{Set: s, env: env, budget: maxNodes, aliased: maxAliased}
	if root != nil {
		r.node(root, "", "", root.Line)
	}
	if r.secret != "" && mode.Perm()&0o004 != 0 {
		s.warn(Origin{source: fromFile, name: name}, "", "holds the secret of %s and is readable by everyone on this machine; run: chmod o-r %s if the relay's user can read it then (with DynamicUser of systemd it cannot), or write ${NAME} in place of the secret and let NAME_FILE name a file that holds it", r.secret, name)
	}
	return r.budget >= 0
}

// parseYAML returns the root of the only document; nil if there is nothing but comments.
func parseYAML(content []byte) (root *yaml.Node, line int, problem string) {
	lines := bytes.Split(content, []byte("\n"))
	lineOf := func(wrong func([]byte) bool) int { return 1 + slices.IndexFunc(lines, wrong) }
	switch {
	case bytes.HasPrefix(content, []byte("\xff\xfe")), bytes.HasPrefix(content, []byte("\xfe\xff")):
		return nil, 0, "is encoded in UTF-16; save it as UTF-8"
	case bytes.IndexByte(content, 0) >= 0:
		return nil, lineOf(func(line []byte) bool { return bytes.IndexByte(line, 0) >= 0 }), "contains a NUL byte; save it as UTF-8 text"
	case mayHaveNodes(content) > maxParsed:
		return nil, 0, fmt.Sprintf("holds more than %d values", maxNodes)
	case !utf8.Valid(content):
		return nil, lineOf(func(line []byte) bool { return !utf8.Valid(line) }), "is not valid UTF-8"
	}
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	var document, second yaml.Node
	err := decoder.Decode(&document)
	if err == nil {
		if err = decoder.Decode(&second); err == nil {
			return nil, second.Line, `begins a second document ("---"); write one`
		}
	}
	tab := lineOf(tabIndent.Match)
	switch at := yamlLine.FindStringSubmatch(err.Error()); {
	case errors.Is(err, io.EOF) && len(document.Content) == 0:
		return nil, 0, ""
	case errors.Is(err, io.EOF):
		return document.Content[0], 0, ""
	case tab > 0 && strings.Contains(err.Error(), "cannot start any token"): // which names no tab
		return nil, tab, "is indented with a tab; YAML allows only spaces"
	case at != nil:
		line, _ = strconv.Atoi(at[1])
	}
	return nil, line, "is not YAML: " + yamlLine.ReplaceAllString(err.Error(), "")
}

// mayHaveNodes returns how many nodes the tree of a file may have at most. Each node follows an
// indicator of YAML, but for the first: a key and its value follow a comma, a brace or a colon.
func mayHaveNodes(content []byte) (n int) {
	n = 2
	for i, b := range content {
		switch b {
		case ',', '{', '[':
			n += 3
		case '?':
			n += 2
		case ':', '-': // an indicator before a space or the end of the line alone, but for a key in quotes: that is in braces
			if i+1 == len(content) || content[i+1] <= ' ' {
				n += 2
			}
		}
	}
	return n
}

var (
	yamlLine  = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)
	tabIndent = regexp.MustCompile(`^ *\t`)
)
