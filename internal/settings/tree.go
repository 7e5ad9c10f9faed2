package settings

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A fileReader walks the file's tree along the shape of the table.
type fileReader struct {
	*Set
	env    environment
	budget int    // of values that may still be read; negative: none is read any more
	secret string // the path of a setting whose secret is written in the file; empty: none

	aliases int // around what is being read
	aliased int // of values that may still be read where aliases stand for them
}

// node reads the value at path: a setting, a section, or a list of sections.
func (r *fileReader) node(n *yaml.Node, pattern, path string, line int) {
	at := Origin{source: fromFile, name: r.File, line: line}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
		r.aliases++
		defer func() { r.aliases-- }()
	}
	row, leaf := r.shape.rows[pattern]
	switch {
	case n.Style&yaml.TaggedStyle != 0:
		r.Problem(at, path, "has a tag (%s); remove it", Quote(n.Tag))
	case leaf:
		r.setting(row.Value, n, path, at, strings.HasSuffix(row.Path, ".*"))
	case isNull(n):
		r.set(path, nil, at)
	case r.shape.isList(pattern) && n.Kind != yaml.SequenceNode:
		r.Problem(at, path, `is not a list; write entries that begin with "- "`)
	case r.shape.isList(pattern):
		r.set(path, nil, at)
		for i, item := range n.Content {
			itemPath := fmt.Sprintf("%s[%d]", path, i)
			r.children[path] = append(r.children[path], itemPath)
			if !r.spend(at) {
				return
			}
			r.node(item, below(pattern, "[]"), itemPath, item.Line)
		}
	case n.Kind != yaml.MappingNode && path == "":
		r.Problem(at, "", `is not a section; write settings such as "database:"`)
	case n.Kind != yaml.MappingNode:
		r.Problem(at, path, "is not a section; write its settings on the lines below it, indented")
	default:
		r.set(path, nil, at)
		r.section(n, pattern, path)
	}
}

// spend counts a value and reports whether it may be read: aliases can make a small file endless,
// and a MiB of unknown keys would print 6 MiB and take seconds of searches for what was meant.
func (r *fileReader) spend(at Origin) bool {
	if r.budget < 0 {
		return false
	}
	r.budget--
	if r.aliases > 0 {
		r.aliased--
	}
	switch {
	case len(r.Problems) >= maxProblems:
		r.budget = -1
		r.Problem(at, "", "was read up to here; correct these problems first")
	case r.aliased < 0:
		r.budget = -1
		r.Problem(at, "", "has aliases that stand for more than %d values, counting each as often as it is used", maxAliased)
	case r.budget < 0:
		r.Problem(at, "", "holds more than %d values", maxNodes)
	}
	return r.budget >= 0
}

func (r *fileReader) section(n *yaml.Node, pattern, path string) {
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		at := Origin{source: fromFile, name: r.File, line: key.Line}
		childPath := below(path, key.Value)
		child, known := r.shape.step(pattern, key.Value)
		first, repeated := seen[key.Value]
		if !r.spend(at) {
			return
		}
		switch {
		case key.Kind != yaml.ScalarNode:
			r.Problem(at, path, "has a key that is not a name")
		case key.ShortTag() == "!!merge":
			r.Problem(at, path, `merge keys ("<<") are not supported; write what destinations share under defaults`)
		case repeated:
			r.Problem(at, childPath, "stands here a second time; the first is in line %d", first)
		case known:
			if child == below(pattern, "*") {
				r.children[path] = append(r.children[path], key.Value)
			}
			r.node(value, child, childPath, key.Line)
		default:
			r.unknown(at, pattern, path, key.Value)
		}
		if !repeated {
			seen[key.Value] = key.Line
		}
	}
}

func (r *fileReader) unknown(at Origin, pattern, path, key string) {
	text := "unknown key " + Quote(below(path, key))
	if guess := r.shape.guess(pattern, key); guess != "" {
		text += fmt.Sprintf("; did you mean %q?", guess)
	}
	r.Problems = append(r.Problems, Problem{origin: at, path: path, text: text, bare: true})
}

// secretName finds the names, among those that the file chooses, whose values are secrets. None of
// such values is shown.
var secretName = regexp.MustCompile(`(?i)[^.]*(auth|token|secret|password|cookie|key)[^.]*$`)

// setting reads one value. named reports whether the file has chosen the last part of its path.
func (r *fileReader) setting(v Value, n *yaml.Node, path string, at Origin, named bool) {
	nodes := []*yaml.Node{n}
	switch {
	case isNull(n):
		r.Problem(at, path, "has no value; write one such as %s, or remove the key", v.example)
		return
	case v.list && n.Kind != yaml.SequenceNode:
		r.Problem(at, path, "is not a list; write one such as %s", v.example)
		return
	case v.list:
		nodes = n.Content
	case n.Kind != yaml.ScalarNode:
		r.Problem(at, path, "is not a single value; write one such as %s", v.example)
		return
	}
	var texts []string
	var places []entry // of the texts
	before := len(r.Problems)
	for i, node := range nodes {
		place := entry{origin: at, path: path}
		if v.list {
			place.path = fmt.Sprintf("%s[%d]", path, i)
			place.origin.line = node.Line
			r.set(place.path, nil, place.origin)
		}
		if !r.spend(place.origin) {
			return
		}
		text, problem := r.scalar(node)
		r.Problem(place.origin, place.path, problem)
		split := []string{text}
		if v.list {
			split = splitList(text) // "${SECRETS}" may hold several
		}
		if problem == "" {
			texts, places = append(texts, split...), append(places, slices.Repeat([]entry{place}, len(split))...)
		}
	}
	sound := len(r.Problems) == before
	switch {
	case sound && len(texts) < v.minimum:
		r.Problem(at, path, "is an empty list; write one such as %s, or remove the key", v.example)
		return
	case len(texts) == 0 && !v.list:
		return
	}
	value, problems := v.parse(texts)
	for i, problem := range problems {
		r.Problem(places[i].origin, places[i].path, problem)
	}
	if len(r.Problems) == before {
		r.set(path, value, at)
		isWritten := func(n *yaml.Node) bool { return !strings.Contains(n.Value, "${") }
		if r.secret == "" && (!named || secretName.MatchString(path)) && r.entries[path].isSecret(v) && slices.ContainsFunc(nodes, isWritten) {
			r.secret = path
		}
	}
}

// scalar returns the text of a value with its references expanded, or what is wrong with it.
func (r *fileReader) scalar(n *yaml.Node) (text, problem string) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch {
	case n.Kind != yaml.ScalarNode:
		return "", "is not a single value"
	case n.Style&yaml.TaggedStyle != 0:
		return "", "has a tag (" + Quote(n.Tag) + "); remove it"
	case isNull(n):
		return "", "has no value"
	}
	return r.expand(r.env, n.Value)
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }
