package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// An environment is the variables that were set, those of …_FILE under the name without it.
type environment struct {
	values   map[string]string
	files    map[string]bool // variables whose value came from their …_FILE
	broken   map[string]bool // variables that were set and cannot be used; that is reported
	referred map[string]bool // variables that the file refers to as ${NAME}
}

// name returns the variable by which a field was set.
func (e environment) name(f field) string {
	if e.files[f.variable()] {
		return f.variable() + fileSuffix
	}
	return f.variable()
}

const (
	fileSuffix = "_FILE"
	configEnv  = envPrefix + "CONFIG"
	maxSecret  = 64 << 10 // bytes of a file that a …_FILE names
)

func (c *config) readEnvironment(list []string, fields []field) environment {
	env := environment{values: map[string]string{}, files: map[string]bool{}, broken: map[string]bool{}, referred: map[string]bool{}}
	for _, entry := range list {
		name, value, _ := strings.Cut(entry, "=")
		env.values[name] = value
	}
	for _, f := range fields {
		if f.env == "" {
			continue
		}
		name := f.variable()
		path := strings.Replace(f.path, "*", defaultDestination, 1)
		at := origin{source: fromEnv, name: name}
		value, set := env.values[name]
		file, fileSet := env.values[name+fileSuffix]
		text := ""
		switch {
		case f.fromFile && set && fileSet:
			text = "is set, and so is " + name + fileSuffix + "; unset one of them"
		case f.fromFile && fileSet:
			at.name += fileSuffix
			env.files[name] = true
			env.values[name], text = c.readSecret(file, at)
		case set && value == "":
			text = "is set but empty; unset it or give it a value"
		}
		if text != "" {
			c.problem(at, path, text)
			delete(env.values, name)
			env.broken[name] = true
		}
	}
	return env
}

// readSecret returns what a file holds, without the newline that editors put at its end, or what is wrong with it.
func (c *config) readSecret(file string, at origin) (text, problem string) {
	if file == "" {
		return "", "is set but empty; unset it or name a file"
	}
	content, mode, err := readRegular(file, maxSecret)
	if err != nil {
		return "", fmt.Sprintf("cannot read %s: %s", file, err)
	}
	text = strings.TrimRight(string(content), "\r\n")
	if text == "" {
		return "", file + " is empty"
	}
	if mode.Perm()&0o004 != 0 {
		c.warn(at, "", "%s is readable by everyone on this machine; run: chmod o-r %s", file, file)
	}
	return text, ""
}

// readRegular reads a file of at most limit bytes. It opens without blocking and refuses what is not a regular file: a
// FIFO would wait for a writer for ever, /dev/zero never ends.
func readRegular(name string, limit int64) ([]byte, fs.FileMode, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, cause(err)
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, 0, cause(err)
	case info.IsDir():
		return nil, 0, errors.New("it is a directory")
	case !info.Mode().IsRegular():
		return nil, 0, errors.New("it is not a regular file")
	}
	content, err := io.ReadAll(io.LimitReader(f, limit+1))
	switch {
	case err != nil:
		return nil, 0, cause(err)
	case int64(len(content)) > limit:
		return nil, 0, fmt.Errorf("it is larger than %d KiB", limit>>10)
	}
	return content, info.Mode(), nil
}

// cause drops the operation and the file's name, which the message around it has already.
func cause(err error) error {
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		return pathErr.Err
	}
	return err
}

var reference = regexp.MustCompile(`\$\$|\$\{([^}]*)(\}?)`)

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// expand replaces ${NAME} and ${NAME:-default}, and $$ by $, or says what is wrong with a reference.
func (e environment) expand(text string) (expanded, problem string) {
	expanded = reference.ReplaceAllStringFunc(text, func(match string) string {
		if match == "$$" {
			return "$"
		}
		parts := reference.FindStringSubmatch(match)
		name, fallback, hasFallback := strings.Cut(parts[1], ":-")
		e.referred[name] = true
		value, set := e.values[name]
		switch {
		case parts[2] == "":
			problem = `has "${" without "}"; write $$ for a dollar sign`
		case !variableName.MatchString(name):
			problem = "has a ${…} that names no variable; write ${NAME}, or $$ for a dollar sign" // it may be a password
		case e.broken[name]:
			problem = fmt.Sprintf("${%s} has a problem of its own", name)
		case value != "":
			return value
		case hasFallback:
			return fallback
		case set:
			problem = fmt.Sprintf("${%s} is empty; write ${%s:-} if that is meant", name, name)
		default:
			problem = fmt.Sprintf("${%s} is not set; set %s, or write ${%s:-default}", name, name, name)
		}
		return ""
	})
	return expanded, problem
}

// kubernetesLink matches what Kubernetes sets for a service called outbox-…, such as OUTBOX_RELAY_PORT_80_TCP_ADDR.
var kubernetesLink = regexp.MustCompile(`_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT(_[0-9]+_(TCP|UDP|SCTP)(_[A-Z]+)?)?$`)

// warnUnknown tells of variables that look like settings and are none.
func (c *config) warnUnknown(env environment, fields []field) {
	known := []string{configEnv}
	for _, f := range fields {
		if f.env != "" {
			known = append(known, f.variable())
		}
		if f.fromFile {
			known = append(known, f.variable()+fileSuffix)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(env.values)) {
		if !strings.HasPrefix(name, envPrefix) || slices.Contains(known, name) || env.referred[name] || kubernetesLink.MatchString(name) {
			continue
		}
		text := "is not a setting of this version"
		if near := nearest(name, known); near != "" {
			text += "; did you mean " + near + "?"
		}
		c.warn(origin{source: fromEnv, name: name}, "", text)
	}
}
