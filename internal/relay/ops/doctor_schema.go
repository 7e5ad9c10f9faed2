package ops

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// damage is an object that is not as the migrations made it.
type damage struct {
	migrations.Object
	state string
}

// schema ends the examination without a schema that this build works with, or with tables missing:
// nothing more can be read.
func (x *examination) schema(ctx context.Context) error {
	newer, err := pg.CheckSchema(ctx, x.o.pool)
	if errors.Is(err, pg.ErrSchema) {
		return x.noSchema(ctx, err)
	}
	if err != nil {
		return err
	}
	creators, err := pg.FindSchemaCreators(ctx, x.o.pool)
	if err != nil {
		return err
	}
	if len(creators.Roles) > 0 {
		x.add("schema", LevelWarning, fmt.Sprintf("in schema %s others may create functions that run with the rights of producers and migrations: %s",
			creators.Schema, strings.Join(creators.Roles, ", ")), fmt.Sprintf("run: REVOKE CREATE ON SCHEMA %s FROM %s", creators.Schema, strings.Join(creators.Roles, ", ")))
	}
	if newer > 0 { // which later migrations made as they are
		return nil
	}
	there, err := x.o.objects(ctx)
	if err != nil {
		return err
	}
	x.damage = compare(migrations.Objects(), there)
	for _, d := range x.damage {
		if d.Kind == "table" || d.Kind == "sequence" {
			x.add("schema", LevelError, fmt.Sprintf("the %s %s is %s", d.Kind, d.Name, d.state), "restore it from a backup, or as "+file(d.Object)+" has it; nothing more can be examined")
			err = errEnd
		}
	}
	return err
}

// noSchema says whether there is another schema, to which search_path does not lead: migrating
// would make a second, empty outbox.
func (x *examination) noSchema(ctx context.Context, found error) error {
	others, err := x.o.otherSchemas(ctx)
	if err != nil {
		return err
	}
	text, _, _ := strings.Cut(found.Error(), "; run: ") // which is the remedy
	if len(others) == 0 {
		x.add("schema", LevelError, text, "outbox-relay migrate up")
		return errEnd
	}
	x.add("schema", LevelError, fmt.Sprintf("search_path does not lead to the outbox, which is in the schema %s", strings.Join(others, ", and one in ")),
		fmt.Sprintf("add search_path=%s to database.url, or run: ALTER ROLE … SET search_path = %[1]s", others[0]))
	return errEnd
}

// compare returns what is not as it should be.
func compare(want []migrations.Object, there []object) (all []damage) {
	fill := strings.NewReplacer()
	for _, o := range there {
		if o.Kind == "schema" {
			fill = strings.NewReplacer("{schema}", o.Name, "{name}", o.State)
		}
	}
	for _, w := range want {
		state := "missing"
		for _, o := range there {
			if o.Kind == w.Kind && o.Name == w.Name[:min(len(w.Name), 63)] { // as PostgreSQL shortens it
				if state = stateOf(w, o, fill.Replace(w.Body)); state != "" { // of two functions with that name one is not ours
					break
				}
			}
		}
		if state != "" {
			all = append(all, damage{w, state})
		}
	}
	return all
}

func stateOf(want migrations.Object, o object, body string) string {
	switch {
	case o.State != "":
		return o.State
	case o.Calls != want.Calls:
		return "made to call " + o.Calls
	case want.Kind != "function":
		return ""
	case body != "" && o.Body != body, o.Definer != want.Definer:
		return "not that of the migrations"
	case settingsOf(o.Settings) != settingsOf(want.Settings):
		return "without its settings (" + strings.Join(want.Settings, ", ") + ")"
	}
	return ""
}

// settingsOf makes settings comparable: the order and the case of names are PostgreSQL's own.
func settingsOf(settings []string) string {
	lines := strings.Split(strings.ToLower(strings.Join(settings, "\n")), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// damaged returns the check of the objects of some kinds.
func (x *examination) damaged(kinds ...string) func(context.Context) error {
	return func(context.Context) error {
		for _, d := range x.damage {
			if slices.Contains(kinds, d.Kind) {
				text, remedy := d.describe()
				x.add(checkOf(d.Kind), LevelError, text, remedy)
			}
		}
		return nil
	}
}

func checkOf(kind string) string {
	return map[string]string{"index": "indexes", "constraint": "constraints", "domain": "constraints", "trigger": "triggers", "function": "functions"}[kind]
}

// describe says what follows from it, and what fixes it.
func (d damage) describe() (text, remedy string) {
	text = fmt.Sprintf("the %s %s is %s: ", d.Kind, d.Name, d.state)
	switch d.Kind {
	case "index":
		text += "claims or lookups read whole tables"
		if d.state != "missing" {
			return text, "run: REINDEX INDEX CONCURRENTLY " + d.Name
		}
		return text, "run: " + strings.Replace(plain.Line(d.SQL), "INDEX", "INDEX CONCURRENTLY", 1)
	case "trigger":
		text += "what it keeps can be broken"
		if d.state == "disabled" {
			return text, "run: ALTER TABLE " + d.On + " ENABLE TRIGGER " + d.Name
		}
		return text, "make it as " + file(d.Object) + " has it"
	case "function":
		if d.state == "open to PUBLIC" {
			return text + "each login may run it with the rights of its owner", "run: REVOKE ALL ON FUNCTION " + d.Name + " FROM PUBLIC"
		}
		return text + "it may do what this version does not expect, or with other rights", "make it as " + file(d.Object) + " has it"
	}
	if d.state == "not validated" {
		return text + "rows may break it", "run: ALTER TABLE … VALIDATE CONSTRAINT " + d.Name
	}
	return text + "rows may break what it keeps", "make it as " + file(d.Object) + " has it"
}

func file(o migrations.Object) string { return "migrations/outbox/" + o.File }

// rights compares what this login and the roles of migrations/roles.sql may do with what that
// script grants.
func (x *examination) rights(ctx context.Context) error {
	roles, err := x.o.roles(ctx)
	if err != nil {
		return err
	}
	lacking, granted := map[string]string{}, map[string]bool{}
	for i, role := range roles {
		prefix, template := "", "outbox_relay" // of this login
		if i > 0 {
			at := strings.LastIndex(role, "outbox_")
			prefix, template = role[:at], role[at:]
		}
		held, err := x.o.missingRights(ctx, role, template)
		switch {
		case err != nil:
			return err
		case i == 0 && len(held.Missing) > 0:
			x.add("rights", LevelError, "this login may not do all that a relay does; it lacks "+plain.Some(held.Missing, 6),
				"run outbox-relay migrate roles as the owner of the tables, then: GRANT outbox_relay TO it")
		case i > 0:
			lacking[role], granted[prefix] = plain.Some(held.Missing, 6), granted[prefix] || held.Used
		}
	}
	for _, role := range roles[1:] {
		if granted[role[:strings.LastIndex(role, "outbox_")]] && lacking[role] != "" { // roles belong to the whole server: these may be for another database
			x.add("rights", LevelWarning, fmt.Sprintf("the role %s lacks %s", role, lacking[role]), "run: outbox-relay migrate roles, as the owner of the tables")
		}
	}
	producers, err := x.o.producers(ctx)
	if len(producers) > 1 {
		x.add("rights", LevelWarning, fmt.Sprintf("%d logins share this outbox: %s; each can take the idempotency keys of the others, and hold up their ordering keys", len(producers), plain.Some(producers, 6)),
			"if they belong to applications that do not trust each other, give each application an outbox in its own schema (database.schema)")
	}
	return err
}
