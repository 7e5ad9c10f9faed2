package config

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const outboxesRest = "destinations: {shop: {url: 'https://shop.test/', signing_secrets: [whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=]}}\n"

// Each mistake names its field, and no password.
func TestMistakesOfOutboxes(t *testing.T) {
	t.Parallel()
	const a = "- {name: a, url: 'postgres://u:hunter2@h/a'}\n"
	for text, want := range map[string]string{
		"database: {url: 'postgres://h/a'}\ndatabases:\n" + a: `database.url: is set, and so is databases; remove one of them`,
		"database: {schema: x}\ndatabases:\n" + a:             `database.schema: is set, and so is databases; remove one of them`,
		"databases: []\n":                                                           `databases: is an empty list`,
		"databases:\n- {url: 'postgres://h/a'}\n":                                   `databases[0].name: is not set; write a name`,
		"databases:\n- {name: '', url: 'postgres://h/a'}\n":                         `databases[0].name: "" is not usable`,
		"databases:\n- {name: 'A b', url: 'postgres://h/a'}\n":                      `databases[0].name: "A b" is not usable`,
		"databases:\n" + a + "- {name: a, url: 'postgres://h/b'}\n":                 `databases[1].name: "a" is the name of databases[0], too`,
		"databases:\n" + a + "- {name: b, url: 'postgres://v:x@H:5432/a'}\n":        `databases[1]: is the same database and schema as databases[0]`,
		"databases:\n" + a + "- {name: b}\n":                                        `databases[1].url: is not set; set url or url_file`,
		"databases:\n" + a + "- {name: b, url: 'mysql://u:hunter2@h/b'}\n":          `databases[1].url: begins with another scheme than postgres://`,
		"databases:\n" + a + "- {name: b, url: 'postgres://h/b', url_file: /x}\n":   `databases[1].url_file: is set beside url; remove one of them`,
		"databases:\n" + a + "- {name: b, url_file: /nowhere}\n":                    `databases[1].url_file: cannot read /nowhere`,
		"databases:\n" + a + "- {name: b, url: 'postgres://h/a', schema: pg_toast}": `databases[1].schema: "pg_toast" belongs to PostgreSQL itself`,
	} {
		file := writeFile(t, filepath.Join(t.TempDir(), "x.yaml"), outboxesRest+text)
		r := command(nil, "config", "check", "-c", file)
		if r.code != 3 || !strings.Contains(r.stderr, want) || strings.Contains(r.stderr, "hunter2") {
			t.Errorf("%s: %d, %s", text, r.code, r.stderr)
		}
		if strings.Count(r.stderr, "\n") != 2 {
			t.Errorf("%s: more than one problem: %s", text, r.stderr)
		}
	}
}

// config check and config show know the list, and a command chooses one of it.
func TestOutboxesAreChosen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	url := writeFile(t, filepath.Join(dir, "url"), "postgres://u:hunter2@h/b\n")
	file := writeFile(t, filepath.Join(dir, "x.yaml"), outboxesRest+
		"databases:\n- {name: a, url: '${A}'}\n- {name: a2, url: '${A}', schema: two}\n- {name: b, url_file: "+url+"}\n")
	env := []string{"A=postgres://u:hunter2@h/a"}
	command(env, "config", "check", "-c", file).expect(t, 0, file+" is valid; it delivers to shop\nIt serves 3 databases\n", "")
	shown := command(env, "config", "show", "-c", file)
	for _, want := range []string{"name: a2 # " + file, "url: postgres://u:***@h:5432/a # ", "url_file: " + url, "schema: two"} {
		if !strings.Contains(shown.stdout, want) || strings.Contains(shown.stdout, "hunter2") {
			t.Errorf("without %s: %v", want, shown)
		}
	}
	load := func(all bool, flags map[string]string) *Config {
		flags["config"] = file
		return loadFrom(sources{Env: env, Flags: flags, All: all}, "database")
	}
	all := load(true, map[string]string{})
	testkit.Must(t, all.Err())
	if len(all.Outboxes) != 3 || all.Pool != nil || all.With(all.Outboxes[1]).Relay.Schema != "two" {
		t.Errorf("%+v", all.Outboxes)
	}
	one := load(false, map[string]string{"database": "b"})
	testkit.Must(t, one.Err())
	if one.DatabaseName() != "postgres://u:***@h:5432/b" || one.Outboxes != nil {
		t.Errorf("%s, %v", one.DatabaseName(), one.Outboxes)
	}
	for want, flags := range map[string]map[string]string{
		"databases: has several entries; choose one with --database NAME: a, a2, b": {},
		`flag --database: "c" is not configured; the names are a, a2, b`:            {"database": "c"},
	} {
		if err := load(false, flags).Err(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
