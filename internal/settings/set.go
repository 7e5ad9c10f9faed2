package settings

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Sources are what a configuration is read from, beside the file.
type Sources struct {
	// Env holds "NAME=value", as [os.Environ] returns it.
	Env []string
	// Flags that were given, by name. The flag "config" names the file.
	Flags map[string]string
	// NoFile leaves the file out, also one that is named.
	NoFile bool
}

// A Set is what the sources say, with the origin of every value and every mistake.
type Set struct {
	// File that was read; empty: none.
	File string
	// Readable reports whether the file could be read, so that what it does not hold is missing.
	Readable bool
	// Problems are mistakes, Warnings are not.
	Problems, Warnings []Problem

	table    Table
	shape    shape
	entries  map[string]entry    // by path, such as "relay.lease" or "routes[0].to"; sections only for their origin
	children map[string][]string // of sections with names and lists: the names, or the paths of the entries
	inherits []inheritance
}

// An entry is one value and where it comes from.
type entry struct {
	value  any
	origin Origin
	path   string // where it was written: below defaults for what a destination inherits from there
}

// Load reads every source along the table. It reports what is wrong with single values, and leaves
// what concerns several of them to the caller, who completes the set ([Set.Inherit], [Set.Default])
// and then binds it.
func Load(table Table, from Sources) *Set {
	s := &Set{table: table, shape: newShape(table.Rows), entries: map[string]entry{}, children: map[string][]string{}}
	for _, r := range table.Rows {
		if r.Value.standard != nil {
			s.Default(r.Path, r.Value.standard)
		}
	}
	env := s.readEnvironment(from.Env)
	s.Readable = from.NoFile || s.readFile(from, env)
	for _, r := range table.Rows {
		if v := env[table.Variable(r)]; v.acts() {
			s.apply(r, v.value, v.origin())
		}
		if v := env[r.Or]; v.acts() && v.value != "" && !s.Given(r.section()) {
			s.apply(r, v.value, v.origin())
		}
		if text, ok := from.Flags[r.Flag]; ok && r.Flag != "" {
			s.apply(r, text, Origin{source: fromFlag, name: r.Flag})
		}
	}
	s.warnUnknown(env)
	return s
}

// set replaces a value of a source with a lower rank.
func (s *Set) set(path string, value any, at Origin) {
	s.entries[path] = entry{value: value, origin: at, path: path}
}

// Default sets a value that no source has set. Show calls its origin "default".
func (s *Set) Default(path string, value any) {
	if !s.Has(path) {
		s.set(path, value, Origin{})
	}
}

// apply sets a row from a variable or a flag.
func (s *Set) apply(r Row, text string, at Origin) {
	if r.Make != nil {
		r.Make(s, at)
	}
	if r.Split != nil {
		s.applySection(r, text, at)
		return
	}
	path := strings.Replace(r.Path, "*", s.table.Unnamed, 1)
	if list, key, ok := strings.Cut(path, "[]."); ok {
		path = s.replaceEntries(list, key, at) + "." + key
	}
	texts := []string{text}
	if r.Value.list {
		texts = splitList(text)
	}
	value, problems := r.Value.parse(texts)
	for i, problem := range problems {
		if problem != "" && len(problems) > 1 {
			problem = fmt.Sprintf("entry %d: %s", i+1, problem)
		}
		s.Problem(at, path, problem)
	}
	if strings.Join(problems, "") == "" {
		s.set(path, value, at)
	}
}

// applySection sets all that is in a section from a variable.
func (s *Set) applySection(r Row, text string, at Origin) {
	section := r.section()
	values, problem := r.Split(text)
	s.Problem(at, section, problem)
	s.set(section, nil, at)
	s.children[section] = slices.Sorted(maps.Keys(values))
	for name, text := range values {
		value, problems := r.Value.parse([]string{text})
		s.Problem(at, section, problems[0])
		s.set(below(section, name), value, at)
	}
}

// replaceEntries removes the entries of a list that have a key, and returns the path of a new one.
func (s *Set) replaceEntries(list, key string, at Origin) string {
	s.children[list] = slices.DeleteFunc(s.children[list], func(entry string) bool { return s.Has(entry + "." + key) })
	path := list + "[" + key + "]" // the file's entries have numbers
	s.Add(list, path, at)
	return path
}

// Add adds a name to a section with names, or an entry's path to a list.
func (s *Set) Add(section, child string, at Origin) {
	s.children[section] = append(s.children[section], child)
	if !strings.HasPrefix(child, section+"[") {
		child = section + "." + child
	}
	s.set(child, nil, at)
}

// Children returns the names in a section that the file gives names to, or the paths of a list's
// entries, in the order of the sources.
func (s *Set) Children(section string) []string { return s.children[section] }

// Has reports whether a source or a default sets the path, be it a setting or a section.
func (s *Set) Has(path string) bool {
	_, ok := s.entry(path)
	return ok
}

// Given reports whether a person has set the path: the file, a variable or a flag, and no default.
func (s *Set) Given(path string) bool {
	e, _ := s.entry(path)
	return e.origin.source != fromDefault
}

// Own reports whether a source sets this very path, so that its value is not inherited.
func (s *Set) Own(path string) bool {
	e, _ := s.entry(path)
	return e.path == path
}

// An inheritance is where the children of a section have the values from that they do not set
// themselves.
type inheritance struct{ section, from string }

// Inherit gives every child of a section the values that it does not set itself, from another
// section. They are looked up there: with thousands of destinations, copies would be most of what a
// configuration holds.
func (s *Set) Inherit(section, from string) {
	s.inherits = append(s.inherits, inheritance{section, from})
}

// entry returns what is set at a path, be it there or where it is inherited from.
func (s *Set) entry(path string) (e entry, ok bool) {
	if e, ok = s.entries[path]; ok {
		return e, true
	}
	for _, in := range s.inherits {
		rest, below := strings.CutPrefix(path, in.section+".")
		for name := 0; below; name++ { // a name with a dot is a mistake, which is reported elsewhere
			next := strings.IndexByte(rest[name:], '.')
			if next < 0 {
				break
			}
			name += next
			if _, child := s.entries[path[:len(in.section)+1+name]]; !child {
				continue
			}
			if e, ok = s.entries[in.from+rest[name:]]; ok {
				return e, true
			}
		}
	}
	return entry{}, false
}

// Release forgets all values, which a relay that runs does not need again. Problems and warnings
// stay.
func (s *Set) Release() { s.entries, s.children = nil, nil }

// Bind writes the values below path into the fields of the rows, whose own paths continue it. A row
// that ends in "*" gets every value there as a map. Fields without a value stay as they are.
func (s *Set) Bind(path string, rows []Row) {
	for _, r := range rows {
		at := below(path, r.Path)
		if section, ok := strings.CutSuffix(at, ".*"); ok {
			r.Value.bind(s.valuesBelow(section))
		} else if e, ok := s.entry(at); ok {
			r.Value.bind(e.value)
		}
	}
}
