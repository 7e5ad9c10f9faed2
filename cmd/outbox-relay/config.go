package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
)

// A config is everything the program was told, by flags, over environment, over file, over defaults. Only the config
// files of this package read those.
type config struct {
	file     string             // empty: there is none
	settings map[string]setting // by path: "relay.lease", "routes[0].to"; sections and items of lists only for their origin

	destinations []string // names, in the order of the file
	routes       []string // paths: "routes[0]"
	channels     []string // paths: "alerts.channels[0]"

	pool   *pgxpool.Config // of database.url; nil if that is unusable
	direct *pgxpool.Config // of database.listen_url; nil if there is none

	wires *wires // of the destinations; set by check

	problems, warnings []problem
}

// A setting is one value and where it comes from.
type setting struct {
	value  any
	origin origin
	path   string // where it was written: below defaults for what a destination inherits from there
}

// sources are what a configuration is read from.
type sources struct {
	env      []string          // "NAME=value", as os.Environ returns it
	flags    map[string]string // those that were given, by name
	hostname string            // what relay.name defaults to
}

// loadConfig reads and checks the whole configuration. With sections, only their mistakes are reported: migrations need
// a database, and neither the secrets nor the destinations that the same file tells the relay.
func loadConfig(from sources, sections ...string) *config {
	c := &config{settings: map[string]setting{}}
	fields := allFields()
	for _, f := range fields {
		if f.standard != nil {
			c.set(f.path, f.standard, origin{})
		}
	}
	c.set("relay.name", from.hostname, origin{})

	env := c.readEnvironment(from.env, fields)
	readable := c.readFile(from, env, newShape(fields))
	for _, f := range fields {
		// What the file refers to as ${NAME} acts there, and only there: otherwise a file that gives OUTBOX_DESTINATION_URL
		// a name of its own would deliver to it twice.
		if text, ok := env.values[f.variable()]; ok && f.env != "" && !env.referred[f.variable()] {
			c.apply(f, text, origin{source: fromEnv, name: env.name(f)})
		}
		if text, ok := from.flags[f.flag]; ok && f.flag != "" {
			c.apply(f, text, origin{source: fromFlag, name: f.flag})
		}
	}
	c.inherit(fields)
	if readable {
		c.check()
	}
	c.warnUnknown(env, fields)

	c.problems = ofSections(c.problems, sections)
	c.warnings = ofSections(c.warnings, sections)
	return c
}

// set puts a value in place of one of a lower rank.
func (c *config) set(path string, value any, at origin) {
	c.settings[path] = setting{value: value, origin: at, path: path}
}

// get returns the value at path, the zero value if there is none.
func get[T any](c *config, path string) T {
	value, _ := c.settings[path].value.(T)
	return value
}

// defaultDestination is what OUTBOX_DESTINATION_URL configures.
const defaultDestination = "default"

// apply sets a field from a variable or a flag.
func (c *config) apply(f field, text string, at origin) {
	path := strings.Replace(f.path, "*", defaultDestination, 1)
	texts := []string{text}
	if f.kind.list {
		texts = splitList(text)
	}
	switch f.path {
	case "destinations.*.url":
		c.addDefaultDestination(at)
	case "alerts.channels[].slack", "alerts.channels[].webhook", "alerts.channels[].service":
		path = c.replaceChannels(path, at)
	}
	value, problems := f.kind.read(texts)
	sound := true
	for i, problem := range problems {
		if problem == "" {
			continue
		}
		sound = false
		if len(problems) > 1 {
			problem = fmt.Sprintf("entry %d: %s", i+1, problem)
		}
		c.problem(at, path, problem)
	}
	if sound {
		c.set(path, value, at)
	}
}

// addDefaultDestination makes a destination that takes every type. Beside destinations of the file that do not include it,
// it would double every event.
func (c *config) addDefaultDestination(at origin) {
	switch {
	case slices.Contains(c.destinations, defaultDestination):
	case len(c.destinations) > 0:
		c.problem(at, "destinations."+defaultDestination, "stands beside the destinations of %s (%s): every event would go to both; unset it, or write its URL into the file",
			c.file, strings.Join(c.destinations, ", "))
	default:
		c.destinations = append(c.destinations, defaultDestination)
		c.set("destinations."+defaultDestination, nil, at)
	}
}

// replaceChannels removes the file's channels of one kind, which a variable overrides, and returns the path of the new
// one.
func (c *config) replaceChannels(pattern string, at origin) string {
	kind := strings.TrimPrefix(pattern, "alerts.channels[].")
	c.channels = slices.DeleteFunc(c.channels, func(channel string) bool {
		_, ok := c.settings[channel+"."+kind]
		return ok
	})
	channel := "alerts.channels[" + kind + "]" // those of the file have numbers
	c.channels = append(c.channels, channel)
	c.set(channel, nil, at)
	return channel + "." + kind
}

// inherit gives every destination what it does not set itself from defaults, and every type to every destination if
// there is no route.
func (c *config) inherit(fields []field) {
	for _, f := range fields {
		policy, ok := strings.CutPrefix(f.path, "defaults.")
		if !ok {
			continue
		}
		for _, name := range c.destinations {
			path := "destinations." + name + "." + policy
			inherited, has := c.settings[f.path]
			if _, ok := c.settings[path]; !ok && has {
				c.settings[path] = inherited
			}
			// The section around it, which a mistake of several values together refers to.
			_, own := c.settings[parent(path)]
			if section, ok := c.settings[parent(f.path)]; ok && !own {
				c.settings[parent(path)] = section
			}
		}
	}
	if len(c.routes) == 0 && len(c.destinations) > 0 {
		c.routes = []string{"routes[0]"}
		c.set("routes[0].event", "*", origin{})
		c.set("routes[0].to", slices.Clone(c.destinations), origin{})
	}
}
