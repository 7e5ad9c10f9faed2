package main

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

const (
	usualFile = "outbox-relay.yaml"
	maxFile   = 1 << 20 // bytes
	maxNodes  = 100_000 // an alias counts as often as it is used

	maxProblems = 100 // that a file is read for
)

// readFile reads the file that --config or OUTBOX_CONFIG names, or the usual one if it exists. It reports whether what
// follows may rely on it.
func (c *config) readFile(from sources, env environment, s shape) bool {
	at := origin{source: fromFlag, name: "config"}
	name, given := from.flags["config"]
	if !given {
		at = origin{source: fromEnv, name: configEnv}
		name, given = env.values[configEnv]
	}
	if given && name == "" {
		c.problem(at, "", "is empty; name a file, or leave it out")
		return false
	}
	if !given {
		name = usualFile
	}
	content, _, err := readRegular(name, maxFile)
	switch {
	case !given && errors.Is(err, fs.ErrNotExist):
		return true
	case !given && err != nil:
		at = origin{source: fromFile, name: name}
		fallthrough
	case err != nil:
		c.problem(at, "", "cannot read %s: %s", name, err)
		return false
	}
	c.file = name
	return c.readYAML(content, env, s)
}

func (c *config) readYAML(content []byte, env environment, s shape) bool {
	content = bytes.TrimPrefix(content, []byte("\ufeff"))
	root, line, problem := parseYAML(content)
	if problem != "" {
		c.problem(origin{source: fromFile, name: c.file, line: line}, "", problem)
		return false
	}
	if root == nil {
		return true
	}
	r := fileReader{config: c, env: env, shape: s, budget: maxNodes}
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

// syntaxProblem turns an error of the YAML parser into a line and a text. The parser's word for a tab is "character that
// cannot start any token".
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
