package migrations

import (
	_ "embed"
	"regexp"
	"strings"
)

//go:embed roles.sql
var roles string

// Roles returns the script roles.sql, which outbox-relay migrate roles runs. It is one statement.
func Roles() string { return roles }

// A Grant is a privilege that roles.sql gives to one of its roles.
type Grant struct {
	Role, Privilege string
	// Kind of what it is on: table, sequence or function.
	Kind string
	// On is the name of it, of a function its signature.
	On string
	// Columns that it is for, separated by commas; empty: for all.
	Columns string
}

var (
	comment    = regexp.MustCompile(`--[^\n]*`)
	grant      = regexp.MustCompile(`(?m)^\s+GRANT ([A-Z][^;]*?)\s+ON ((?:FUNCTION|SEQUENCE) )?([^;]*?)\s+TO ([a-z_, ]+);`)
	outerComma = regexp.MustCompile(`,\s*(?:[^,()]+\([^()]*\)|[^,()]+)`)
)

// Grants returns what roles.sql grants. It reads that script, so that what examines the rights of a
// role cannot fall behind it.
func Grants() (all []Grant) {
	for _, m := range grant.FindAllStringSubmatch(comment.ReplaceAllString(roles, ""), -1) {
		kind := strings.ToLower(strings.TrimSpace(m[2]))
		if kind == "" {
			kind = "table"
		}
		for _, role := range listed(m[4]) {
			for _, on := range listed(m[3]) {
				for _, privilege := range listed(m[1]) {
					name, columns, _ := strings.Cut(strings.TrimSuffix(privilege, ")"), "(")
					all = append(all, Grant{strings.TrimSpace(role), strings.TrimSpace(name), kind, on, strings.Join(strings.Fields(columns), "")})
				}
			}
		}
	}
	return all
}

// listed splits a list at its commas, but not at those within parentheses.
func listed(text string) (items []string) {
	for _, item := range outerComma.FindAllString(","+text, -1) {
		items = append(items, strings.TrimSpace(item[1:]))
	}
	return items
}
