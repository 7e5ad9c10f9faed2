package settings

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// An Origin is where a value comes from. The zero value is the program's own default.
type Origin struct {
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

// String returns the origin as problems and [Set.Show] print it.
func (o Origin) String() string {
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

// Flag is the origin of what a flag of a command says.
func Flag(name string) Origin { return Origin{source: fromFlag, name: name} }

// A Problem is one mistake: where it was made, what is wrong, what to write instead. It repeats no
// secret.
type Problem struct {
	origin Origin
	path   string // of the setting; empty: the file or the environment as a whole
	text   string
	bare   bool // the text names the place itself
}

// String returns the problem as one printable line. A variable or flag is the setting's name
// already; elsewhere the path says which setting of a line has the problem.
func (p Problem) String() string {
	var parts []string
	if p.origin.source != fromDefault {
		parts = append(parts, p.origin.String())
	}
	if p.path != "" && !p.bare && p.origin.source != fromEnv && p.origin.source != fromFlag {
		parts = append(parts, p.path)
	}
	return plain.Line(strings.Join(append(parts, p.text), ": "))
}

// Problem reports a mistake that was made at an origin. Without a text, as a [Parser] returns it,
// there is none.
func (s *Set) Problem(at Origin, path, format string, args ...any) {
	if format != "" {
		s.Problems = append(s.Problems, Problem{origin: at, path: path, text: sprintf(format, args)})
	}
}

func (s *Set) warn(at Origin, path, format string, args ...any) {
	s.Warnings = append(s.Warnings, Problem{origin: at, path: path, text: sprintf(format, args)})
}

// WarnAt warns of the value at path, where it was written.
func (s *Set) WarnAt(path, format string, args ...any) {
	e, _ := s.entry(path)
	s.warn(e.origin, e.path, format, args...)
}

// sprintf leaves a format without arguments alone: a finished text may hold a percent sign.
func sprintf(format string, args []any) string {
	if len(args) == 0 {
		return format
	}
	return fmt.Sprintf(format, args...)
}

// Failed reports whether a mistake at path, or in a section around it, was reported already. A
// later check would only repeat it, with the default in place of the intended value.
func (s *Set) Failed(path string) bool {
	return slices.ContainsFunc(s.Problems, func(p Problem) bool {
		return p.path != "" && !p.bare && (p.path == path || strings.HasPrefix(path, p.path+".") || strings.HasPrefix(path, p.path+"["))
	})
}

// FailedBelow reports whether a mistake within the section at path was reported already.
func (s *Set) FailedBelow(path string) bool {
	return slices.ContainsFunc(s.Problems, func(p Problem) bool { return strings.HasPrefix(p.path, path+".") || p.bare && p.path == path })
}

// ProblemAt reports a mistake at a path, with the origin of its value or of the nearest section
// around it.
func (s *Set) ProblemAt(path, text string) {
	for at := path; at != ""; at = parent(at) {
		if e, ok := s.entry(at); ok {
			s.Problem(e.origin, e.path+strings.TrimPrefix(path, at), text)
			return
		}
	}
	s.Problem(Origin{}, path, text)
}

// Keep drops the problems and warnings of other sections than these; without sections it drops
// none. It sorts the rest in the order in which a person corrects them, the file from top to bottom
// first, and drops repetitions that a shared default causes.
func (s *Set) Keep(sections ...string) {
	s.Problems, s.Warnings = ofSections(s.Problems, sections), ofSections(s.Warnings, sections)
}

func ofSections(problems []Problem, sections []string) []Problem {
	problems = slices.DeleteFunc(problems, func(p Problem) bool {
		return len(sections) > 0 && p.path != "" && !slices.ContainsFunc(sections, func(section string) bool {
			return p.path == section || strings.HasPrefix(p.path, section+".") || strings.HasPrefix(p.path, section+"[")
		})
	})
	rank := map[source]int{fromFile: 0, fromEnv: 1, fromFlag: 2, fromDefault: 3}
	slices.SortStableFunc(problems, func(a, b Problem) int {
		return cmp.Or(
			cmp.Compare(rank[a.origin.source], rank[b.origin.source]),
			cmp.Compare(a.origin.line, b.origin.line),
			cmp.Compare(a.origin.name, b.origin.name),
		)
	})
	return slices.Compact(problems)
}

// An Error is a configuration with mistakes, with which nothing can be started.
type Error struct{ problems []Problem }

func (e Error) Error() string {
	var b strings.Builder
	for _, p := range e.problems {
		b.WriteString(p.String() + "\n")
	}
	b.WriteString(plain.Plural(len(e.problems), "problem", "problems") + ". Nothing starts with this configuration.")
	return b.String()
}

// Err returns the mistakes as an [Error]; nil if there is none.
func (s *Set) Err() error {
	if len(s.Problems) > 0 {
		return Error{s.Problems}
	}
	return nil
}
