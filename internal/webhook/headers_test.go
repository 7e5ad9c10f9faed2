package webhook

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// reservedPattern writes the names that an event may not bring as the regular expression that the database's constraint
// uses: a name stands between a quotation mark and '": ', and any sign but a letter or a digit counts as '-'.
func reservedPattern() string {
	names := slices.Concat(reservedNames[:], reservedNamesForEvents[:])
	for _, prefix := range slices.Concat(reservedPrefixes[:], reservedPrefixesForEvents[:]) {
		names = append(names, prefix+`[^"]*`)
	}
	slices.Sort(names)
	dash := regexp.MustCompile(`[a-z0-9]-`) // not the sign at the end of [^"]
	pattern := strings.Join(names, "|")
	return `(^\{|", )"(` + dash.ReplaceAllStringFunc(pattern, func(s string) string { return s[:1] + `[^0-9A-Za-z"]` }) + `)": `
}

// The migration that defines the function of the rule must hold the list of this package.
func TestSecurityMigrationsHoldTheReservedNames(t *testing.T) {
	t.Parallel()
	const path = "../../migrations/outbox/00001_event.sql"
	migration, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	up, _, _ := strings.Cut(string(migration), "-- +goose Down")
	up = regexp.MustCompile(`'\n *'`).ReplaceAllString(up, "") // a literal that goes on in the next line
	if want := "'" + reservedPattern() + "'"; !strings.Contains(up, want) {
		t.Errorf("%s lacks the reserved names of this package: a new migration has to define outbox_headers_are_fit with\n%s", path, want)
	}
}

func TestSameName(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"X-Real-Ip", "x-real-ip", "X_REAL_IP", "X.Real~Ip", "x!real|ip"} {
		if !SameName(name, "X-Real-Ip") || !ReservedForEvents(name) {
			t.Errorf("%s is another name", name)
		}
	}
	for _, name := range []string{"X-Real-Ipx", "X-Real-I", "XX-Real-Ip", "X0Real-Ip", "", "X--Real-Ip"} {
		if SameName(name, "X-Real-Ip") || ReservedForEvents(name) {
			t.Errorf("%s is the same name", name)
		}
	}
}
