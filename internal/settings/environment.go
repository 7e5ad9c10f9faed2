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

// An environment holds the variables that are set. The value from a …_FILE stands under the name
// without the suffix.
type environment map[string]*variable

type variable struct {
	name     string // as a person has set it, with the suffix of a …_FILE
	value    string
	broken   bool // it has a problem, which is reported
	referred bool // the file refers to it as ${NAME}
}

// acts reports whether the variable sets a setting. One that the file refers to acts only there: a
// file that gives OUTBOX_DESTINATION_URL its own name would otherwise deliver to it twice.
func (v *variable) acts() bool { return v != nil && !v.broken && !v.referred }

func (v *variable) origin() Origin { return Origin{source: fromEnv, name: v.name} }

const fileSuffix = "_FILE"

// MaxSecret bounds a file that holds a secret, in bytes.
const MaxSecret = 64 << 10

func (s *Set) readEnvironment(list []string) environment {
	env := environment{}
	for _, entry := range list {
		if name, value, _ := strings.Cut(entry, "="); name != "" {
			env[name] = &variable{name: name, value: value}
		}
	}
	for _, r := range s.table.Rows {
		name := s.table.Variable(r)
		v, set := env[name]
		file, fileSet := env[name+fileSuffix]
		text := ""
		switch {
		case name == "":
		case r.FromFile && set && fileSet:
			text = "is set, and so is " + file.name + "; unset one of them"
		case r.FromFile && fileSet:
			v = &variable{name: file.name}
			env[name] = v
			v.value, text = s.readSecret(file.value, v.origin())
		case set && v.value == "":
			text = "is set but empty; unset it or give it a value"
		}
		if text != "" {
			v.broken = true
			s.Problem(v.origin(), strings.Replace(r.Path, "*", s.table.Unnamed, 1), text)
		}
	}
	return env
}

// readSecret returns what a file holds, without the newline that editors put at its end, or what is
// wrong with it.
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

// WarnReadable warns of a secret file that everyone on the machine can read. path is the setting
// that names it.
func (s *Set) WarnReadable(path, file string) {
	if info, err := os.Stat(file); err == nil && info.Mode().Perm()&0o004 != 0 {
		s.WarnAt(path, openToAll, file, file)
	}
}

// readRegular reads a file of at most limit bytes. It opens without blocking and refuses what is
// not a regular file: a FIFO would wait for a writer for ever, /dev/zero never ends.
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

// lookUp returns the variable that a file refers to as ${NAME}: NAME, or what the file holds that
// NAME_FILE names; nil: neither is set. It says what is wrong with that file.
func (s *Set) lookUp(e environment, name string) (v *variable, problem string) {
	file := e[name+fileSuffix]
	if e[name] == nil && file != nil {
		file.referred = true
		v = &variable{name: file.name}
		v.value, problem = s.readSecret(file.value, v.origin())
		if problem != "" {
			return nil, fmt.Sprintf("${%s}: %s: %s", name, file.name, problem)
		}
		e[name] = v // which is read once, and warned of once
	}
	if v = e[name]; v != nil {
		v.referred = true
	}
	return v, ""
}

// expand replaces ${NAME} and ${NAME:-default}, and $$ by $, or says what is wrong with a
// reference.
func (s *Set) expand(e environment, text string) (expanded, problem string) {
	expanded = reference.ReplaceAllStringFunc(text, func(match string) string {
		if match == "$$" {
			return "$"
		}
		parts := reference.FindStringSubmatch(match)
		name, fallback, hasFallback := strings.Cut(parts[1], ":-")
		v, unread := s.lookUp(e, name)
		set := v != nil
		switch {
		case parts[2] == "":
			problem = `has "${" without "}"; write $$ for a dollar sign`
		case !variableName.MatchString(name):
			problem = "has a ${…} that names no variable; write ${NAME}, or $$ for a dollar sign" // it may be a password
		case unread != "":
			problem = unread
		case set && v.broken:
			problem = fmt.Sprintf("${%s} has its own problem", name)
		case set && v.value != "":
			return v.value
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

// kubernetesLink matches what Kubernetes sets for a service called outbox-…, such as
// OUTBOX_RELAY_PORT_80_TCP_ADDR.
var kubernetesLink = regexp.MustCompile(`_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT(_[0-9]+_(TCP|UDP|SCTP)(_[A-Z]+)?)?$`)

// warnUnknown warns of variables that look like settings and are none.
func (s *Set) warnUnknown(env environment) {
	known := []string{s.table.configEnv()}
	for _, r := range s.table.Rows {
		name := s.table.Variable(r)
		if name != "" {
			known = append(known, name)
		}
		if r.FromFile {
			known = append(known, name+fileSuffix)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if !strings.HasPrefix(name, s.table.Prefix) || slices.Contains(known, name) || env[name].referred || kubernetesLink.MatchString(name) {
			continue
		}
		text := "is not a setting of this version"
		if near := Nearest(name, known); near != "" {
			text += "; did you mean " + near + "?"
		}
		s.warn(env[name].origin(), "", text)
	}
}
