package settings

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

// An environment holds the variables that are set. The value from a …_FILE stands under the name without the suffix.
type environment struct {
	values   map[string]string
	files    map[string]bool // variables whose value came from their …_FILE
	broken   map[string]bool // variables with a problem, which is reported
	referred map[string]bool // variables that the file refers to as ${NAME}
}

// name returns the variable that a person has set: the one given, or its …_FILE.
func (e environment) name(variable string) string {
	if e.files[variable] {
		return variable + fileSuffix
	}
	return variable
}

const fileSuffix = "_FILE"

// MaxSecret bounds a file that holds a secret, in bytes.
const MaxSecret = 64 << 10

func (s *Set) readEnvironment(list []string) environment {
	env := environment{values: map[string]string{}, files: map[string]bool{}, broken: map[string]bool{}, referred: map[string]bool{}}
	for _, entry := range list {
		name, value, _ := strings.Cut(entry, "=")
		env.values[name] = value
	}
	for _, r := range s.table.Rows {
		name := s.table.variable(r)
		if name == "" {
			continue
		}
		at := Origin{source: fromEnv, name: name}
		value, set := env.values[name]
		file, fileSet := env.values[name+fileSuffix]
		text := ""
		switch {
		case r.FromFile && set && fileSet:
			text = "is set, and so is " + name + fileSuffix + "; unset one of them"
		case r.FromFile && fileSet:
			at.name += fileSuffix
			env.files[name] = true
			env.values[name], text = s.readSecret(file, at)
		case set && value == "":
			text = "is set but empty; unset it or give it a value"
		}
		if text != "" {
			s.Problem(at, strings.Replace(r.Path, "*", s.table.Unnamed, 1), text)
			delete(env.values, name)
			env.broken[name] = true
		}
	}
	return env
}

// readSecret returns what a file holds, without the newline that editors put at its end, or what is wrong with it.
func (s *Set) readSecret(file string, at Origin) (text, problem string) {
	if file == "" {
		return "", "is set but empty; unset it or name a file"
	}
	content, mode, err := readRegular(file, MaxSecret)
	if err != nil {
		return "", fmt.Sprintf("cannot read %s: %s", file, err)
	}
	text = strings.TrimRight(string(content), "\r\n")
	if text == "" {
		return "", file + " is empty"
	}
	if mode.Perm()&0o004 != 0 {
		s.warn(at, "", openToAll, file, file)
	}
	return text, ""
}

const openToAll = "%s is readable by everyone on this machine; run: chmod o-r %s"

// WarnReadable warns of a secret file that everyone on the machine can read. path is the setting that names it.
func (s *Set) WarnReadable(path, file string) {
	if info, err := os.Stat(file); err == nil && info.Mode().Perm()&0o004 != 0 {
		s.WarnAt(path, openToAll, file, file)
	}
}

// readRegular reads a file of at most limit bytes. It opens without blocking and refuses what is not a regular file: a
// FIFO would wait for a writer for ever, /dev/zero never ends.
func readRegular(name string, limit int64) ([]byte, fs.FileMode, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) //nolint:gosec // G304: the operator names the file
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

// warnUnknown warns of variables that look like settings and are none.
func (s *Set) warnUnknown(env environment) {
	known := []string{s.table.configEnv()}
	for _, r := range s.table.Rows {
		if name := s.table.variable(r); name != "" {
			known = append(known, name)
			if r.FromFile {
				known = append(known, name+fileSuffix)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(env.values)) {
		if !strings.HasPrefix(name, s.table.Prefix) || slices.Contains(known, name) || env.referred[name] || kubernetesLink.MatchString(name) {
			continue
		}
		text := "is not a setting of this version"
		if near := Nearest(name, known); near != "" {
			text += "; did you mean " + near + "?"
		}
		s.warn(Origin{source: fromEnv, name: name}, "", text)
	}
}
