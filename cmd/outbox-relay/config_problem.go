package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// An origin is where a value comes from. The zero value is the program's own default.
type origin struct {
	source source
	name   string // of the file, the variable or the flag
	line   int    // in the file; 0: the file as a whole
}

type source int

const (
	fromDefault source = iota
	fromFile
	fromEnv
	fromFlag
)

func (o origin) String() string {
	switch o.source {
	case fromFile:
		if o.line == 0 {
			return o.name
		}
		return fmt.Sprintf("%s:%d", o.name, o.line)
	case fromEnv:
		return "env " + o.name
	case fromFlag:
		return "flag --" + o.name
	}
	return "default"
}

// A problem is one mistake: where it was made, what is wrong, what to write instead. It repeats no secret.
type problem struct {
	origin origin
	path   string // of the setting; empty: the file or the environment as a whole
	text   string
	bare   bool // the text names the place itself
}

// String is the line that a person reads. A variable or flag is the setting's name already; elsewhere the path says
// which of a line's settings is meant.
func (p problem) String() string {
	var parts []string
	if p.origin.source != fromDefault {
		parts = append(parts, p.origin.String())
	}
	if p.path != "" && !p.bare && p.origin.source != fromEnv && p.origin.source != fromFlag {
		parts = append(parts, p.path)
	}
	return printable(strings.Join(append(parts, p.text), ": "))
}

func (c *config) problem(at origin, path, format string, args ...any) {
	c.problems = append(c.problems, problem{origin: at, path: path, text: sprintf(format, args)})
}

func (c *config) warn(at origin, path, format string, args ...any) {
	c.warnings = append(c.warnings, problem{origin: at, path: path, text: sprintf(format, args)})
}

// sprintf leaves a format without arguments alone: a finished text may hold a percent sign.
func sprintf(format string, args []any) string {
	if len(args) == 0 {
		return format
	}
	return fmt.Sprintf(format, args...)
}

// failed reports whether a mistake at path, or in a section around it, was reported already. What is checked later
// would only repeat it, with the default in place of what was meant.
func (c *config) failed(path string) bool {
	return slices.ContainsFunc(c.problems, func(p problem) bool {
		return p.path != "" && !p.bare && (p.path == path || strings.HasPrefix(path, p.path+".") || strings.HasPrefix(path, p.path+"["))
	})
}

// failedBelow reports whether a mistake within the section at path was reported already.
func (c *config) failedBelow(path string) bool {
	return slices.ContainsFunc(c.problems, func(p problem) bool { return strings.HasPrefix(p.path, path+".") || p.bare && p.path == path })
}

// problemAt reports a mistake at a path where the value that stands there, or the nearest section around it, was
// written.
func (c *config) problemAt(path, text string) {
	for at := path; at != ""; at = parent(at) {
		if s, ok := c.settings[at]; ok {
			c.problem(s.origin, s.path+strings.TrimPrefix(path, at), text)
			return
		}
	}
	c.problem(origin{}, path, text)
}

// parent cuts the last step off a path.
func parent(path string) string {
	return path[:max(0, strings.LastIndexAny(path, ".["))]
}

// ofSections keeps the problems of some sections, and those of no section; all without sections. It sorts them as one
// would mend them, top to bottom of the file first, and drops what a shared default would repeat for each destination.
func ofSections(problems []problem, sections []string) []problem {
	problems = slices.DeleteFunc(problems, func(p problem) bool {
		return len(sections) > 0 && p.path != "" && !slices.ContainsFunc(sections, func(section string) bool {
			return p.path == section || strings.HasPrefix(p.path, section+".")
		})
	})
	rank := func(s source) int { return map[source]int{fromFile: 0, fromEnv: 1, fromFlag: 2, fromDefault: 3}[s] }
	slices.SortStableFunc(problems, func(a, b problem) int {
		return cmp.Or(
			cmp.Compare(rank(a.origin.source), rank(b.origin.source)),
			cmp.Compare(a.origin.line, b.origin.line),
			cmp.Compare(a.origin.name, b.origin.name),
		)
	})
	return slices.Compact(problems)
}

// configError is a configuration that nothing can be started with.
type configError struct{ problems []problem }

func (e configError) Error() string {
	var b strings.Builder
	for _, p := range e.problems {
		b.WriteString(p.String() + "\n")
	}
	b.WriteString(plain.Plural(len(e.problems), "problem", "problems") + ". Nothing was started.")
	return b.String()
}

// err returns the configuration's mistakes; nil if it can be used.
func (c *config) err() error {
	if len(c.problems) > 0 {
		return configError{c.problems}
	}
	return nil
}
