package settings

import (
	"slices"
	"strings"
)

// A Table describes every setting of a program.
type Table struct {
	// Prefix of the environment variables, such as "OUTBOX_". The variable Prefix+"CONFIG" names
	// the file.
	Prefix string
	// File is read if it exists and neither the flag "config" nor the variable names one.
	File string
	// Unnamed replaces "*" in the path of a row that a variable or flag sets.
	Unnamed string
	// Rows in the order in which Show prints them.
	Rows []Row
}

// A Row is one setting.
type Row struct {
	// Path as the file spells it. "*" stands for a name that the file chooses, "[]" for a position
	// in a list.
	Path string
	// Env is the variable without the table's prefix, if its name does not derive from Path.
	Env string
	// Entry: this key alone makes an entry of the list in Path. The variable replaces the entries
	// of the list that have this key.
	Entry bool
	// Or is a variable that users know from other programs, by its whole name. It sets the row
	// where neither a flag, Env nor the file does, and counts as not set when it is empty. Empty:
	// none.
	Or string
	// Flag without "--". Empty: none.
	Flag string
	// FromFile: the variable may be given as …_FILE instead, the name of a file that holds the
	// value.
	FromFile bool
	// Value says how the setting is parsed, what its default is, and where it is written.
	Value Value
	// Split says what a variable holds of a section in which the file chooses the keys, or what is
	// wrong with it. The variable replaces the whole section. Nil: such a section has no variable.
	Split func(text string) (values map[string]string, problem string)
	// Make runs before a variable or flag sets a row with "*" in its path, to add the section
	// around it. Nil: the value makes no section.
	Make func(s *Set, at Origin)
}

// A Value connects the text of a setting with a typed field. [One], [Many] and [Each] make it.
type Value struct {
	list     bool   // several texts; otherwise exactly one
	example  string // of the whole value, in YAML
	minimum  int    // of texts in a list
	standard any    // the default; nil: none
	// parse returns the value, and what is wrong with each text (empty: nothing).
	parse func(texts []string) (value any, problems []string)
	bind  func(value any)
	show  func(value any) string // nil: [Set.Show] prints the value as it is
}

// A Parser returns the value that a text stands for, or what is wrong with the text (empty:
// nothing).
type Parser[T any] func(text string) (value T, problem string)

// To returns a function that writes to a field.
func To[T any](field *T) func(T) { return func(value T) { *field = value } }

// One describes a setting with one value. Problems show example. The default, if there is one, is
// the last argument.
func One[T any](example string, parse Parser[T], bind func(T), standard ...T) Value {
	return newValue(Value{example: example, bind: bound(bind), parse: func(texts []string) (any, []string) {
		value, problem := parse(texts[0])
		return value, []string{problem}
	}}, standard)
}

// Many describes a setting with a list of values.
func Many[T any](example string, parse Parser[T], bind func([]T), standard ...[]T) Value {
	return newValue(Value{list: true, example: example, bind: bound(bind), parse: func(texts []string) (any, []string) {
		values, problems := make([]T, len(texts)), make([]string, len(texts))
		for i, text := range texts {
			values[i], problems[i] = parse(text)
		}
		return values, problems
	}}, standard)
}

func newValue[T any](v Value, standard []T) Value {
	if len(standard) > 0 {
		v.standard = standard[0]
	}
	return v
}

// Each describes a section in which the file chooses the keys: a row whose path ends in "*".
func Each[T any](example string, parse Parser[T], bind func(map[string]T)) Value {
	v := One(example, parse, nil)
	v.bind = bound(func(values map[string]any) {
		typed := map[string]T{}
		for key, value := range values {
			typed[key] = value.(T) //nolint:forcetypeassert // as in bound
		}
		bind(typed)
	})
	return v
}

func bound[T any](bind func(T)) func(any) {
	return func(value any) { bind(value.(T)) } //nolint:forcetypeassert // the row's parser made the value
}

// Showing returns the value with another text for [Set.Show], such as a URL without its password.
func Showing[T any](v Value, text func(T) string) Value {
	v.show = func(value any) string { return text(value.(T)) } //nolint:forcetypeassert // as in bound
	return v
}

// NotEmpty refuses a list without entries.
func (v Value) NotEmpty() Value {
	v.minimum = 1
	return v
}

// Under returns the rows with a path before each of theirs.
func Under(path string, rows []Row) []Row {
	rows = slices.Clone(rows)
	for i := range rows {
		rows[i].Path = below(path, rows[i].Path)
	}
	return rows
}

// Inherited returns the rows without flags and defaults, which [Set.Inherit] sets.
func Inherited(rows []Row) []Row {
	rows = slices.Clone(rows)
	for i := range rows {
		rows[i].Flag, rows[i].Value.standard = "", nil
	}
	return rows
}

// Variable returns the row's environment variable: the prefix, and the path in capitals with "_"
// for ".". "servers.*.url" is SERVER_URL, the URL of the unnamed server. Empty: none, as a file
// chooses the path.
func (t Table) Variable(r Row) string {
	if r.Env != "" {
		return t.Prefix + r.Env
	}
	path := r.section()
	if t.Unnamed != "" {
		path = strings.Replace(path, "s.*.", ".", 1)
	}
	if r.Entry {
		path = strings.Replace(path, "[]", "", 1)
	}
	if strings.ContainsAny(path, "*[") {
		return ""
	}
	return t.Prefix + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// section returns the path, of a row with Split that of the section.
func (r Row) section() string {
	if r.Split != nil {
		return strings.TrimSuffix(r.Path, ".*")
	}
	return r.Path
}

// configEnv is the variable that names the file.
func (t Table) configEnv() string { return t.Prefix + "CONFIG" }

// A shape is the tree that the rows make. Its nodes are named by patterns, in which the position in
// a list is its own step: "routes.[].event".
type shape struct {
	paths    []string // of the rows
	rows     map[string]Row
	children map[string][]string // the steps below a section, in order
}

func newShape(rows []Row) shape {
	s := shape{rows: map[string]Row{}, children: map[string][]string{}}
	for _, r := range rows {
		pattern := ""
		for step := range strings.SplitSeq(strings.ReplaceAll(r.Path, "[]", ".[]"), ".") {
			if !slices.Contains(s.children[pattern], step) {
				s.children[pattern] = append(s.children[pattern], step)
			}
			pattern = below(pattern, step)
		}
		s.paths = append(s.paths, r.Path)
		s.rows[pattern] = r
	}
	return s
}

// step returns the pattern of key in the section at pattern, and whether there is such a key.
func (s shape) step(pattern, key string) (string, bool) {
	switch children := s.children[pattern]; {
	case slices.Contains(children, "*"):
		return below(pattern, "*"), true
	case slices.Contains(children, key) && key != "[]":
		return below(pattern, key), true
	}
	return below(pattern, key), false
}

func (s shape) isList(pattern string) bool { return slices.Contains(s.children[pattern], "[]") }

// guess returns the key that an unknown one probably stands for: the same key in another section,
// which a wrong indentation makes of it, one of a section below, or a neighbour with a similar
// spelling. Empty: none.
func (s shape) guess(pattern, key string) string {
	for _, path := range s.paths {
		if inner, found := strings.CutPrefix(path, pattern+"."); found && (strings.HasSuffix(inner, "."+key) || strings.ReplaceAll(inner, ".", "_") == key) {
			return inner
		}
	}
	for _, path := range s.paths {
		for ; path != "" && !strings.ContainsAny(path, "*["); path = parent(path) {
			if strings.HasSuffix(path, "."+key) {
				return path
			}
		}
	}
	return Nearest(key, s.children[pattern])
}

// below appends a step to a pattern or path.
func below(path, step string) string {
	if path == "" {
		return step
	}
	return path + "." + step
}

// parent cuts the last step off a path.
func parent(path string) string {
	return path[:max(0, strings.LastIndexAny(path, ".["))]
}
