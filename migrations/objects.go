package migrations

import (
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
)

// An Object is something that the migrations of [Outbox] leave in a database.
type Object struct {
	// Kind: table, sequence, domain, constraint, index, trigger or function.
	Kind string
	Name string
	// On is the table of an index or trigger.
	On string
	// Calls is the function of a trigger.
	Calls string
	// File that made it as it is.
	File string
	// SQL of an index or trigger: the statement that makes it.
	SQL string
	// Body of a function, with {schema} and {name} where the migration writes the schema.
	// Empty: later versions may have another.
	Body string
	// Settings of a function as pg_proc has them: "search_path=pg_catalog, pg_temp".
	Settings []string
	// Definer: the function runs with the rights of its owner.
	Definer bool
}

var (
	statementEnd = regexp.MustCompile(`;\s*(?:--[^\n]*)?\n`)
	made         = regexp.MustCompile(`(?m)^(?:CREATE (?:OR REPLACE )?(?:UNIQUE )?(TABLE|SEQUENCE|DOMAIN|INDEX|TRIGGER|FUNCTION)(?: CONCURRENTLY)?| +(CONSTRAINT)) (?:\{schema\}\.)?(\w+)`)
	onTable      = regexp.MustCompile(`\sON (\w+)`)
	calls        = regexp.MustCompile(`EXECUTE FUNCTION (\w+)`)
	setting      = regexp.MustCompile(`\bSET (\w+) = '?(pg_catalog, pg_temp|\w+)`)
	primaryKey   = regexp.MustCompile(`(?m)^\s+.*\bPRIMARY KEY\b`)
)

// Objects returns what [Outbox] leaves in a database, in the order of the files. It reads the
// files, so that what examines a database against them cannot fall behind. It panics on a file that
// it cannot read: a test runs it.
func Objects() (all []Object) {
	files := Outbox.FS()
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		panic(fmt.Sprintf("migrations: list files: %v", err))
	}
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			panic(fmt.Sprintf("migrations: read %s: %v", name, err))
		}
		up, _, _ := strings.Cut(string(text), "-- +goose Down")
		for _, at := range made.FindAllStringSubmatchIndex(up, -1) {
			group := func(n int) string {
				if at[2*n] < 0 {
					return ""
				}
				return up[at[2*n]:at[2*n+1]]
			}
			o := Object{Kind: strings.ToLower(group(1) + group(2)), Name: group(3), File: name}
			all = slices.DeleteFunc(all, func(old Object) bool { return old.Name == o.Name && old.Kind == o.Kind }) // replaced
			all = append(all, o.read(up[at[0]:])...)
		}
	}
	return all
}

// read completes an object with what its statement says, and returns it with what the statement
// makes beside it.
func (o Object) read(text string) []Object {
	end := statementEnd.FindStringIndex(text)
	switch o.Kind {
	case "function":
		head, body, _ := strings.Cut(text, " AS ")
		for _, m := range setting.FindAllStringSubmatch(head, -1) {
			o.Settings = append(o.Settings, m[1]+"="+m[2])
		}
		o.Definer = strings.Contains(head, "SECURITY DEFINER")
		if rest, quoted := strings.CutPrefix(body, "$$"); quoted {
			o.Body, _, _ = strings.Cut(rest, "$$;")
		}
	case "index", "trigger":
		o.SQL = strings.TrimSpace(text[:end[0]])
		o.On = onTable.FindStringSubmatch(o.SQL)[1]
		if m := calls.FindStringSubmatch(o.SQL); m != nil {
			o.Calls = m[1]
		}
	case "table":
		if primaryKey.MatchString(text[:end[0]]) {
			return []Object{o, {Kind: "constraint", Name: o.Name + "_pkey", File: o.File}}
		}
	}
	return []Object{o}
}
