// Package check collects the mistakes in a configuration, each with the path of its setting.
package check

import (
	"errors"
	"fmt"
)

// A Problem is one mistake in a configuration.
type Problem struct {
	// Path of the setting, as a configuration file spells it: "destinations.logistics.timeout".
	Path string
	// Text says what is wrong and what to write instead.
	Text string
}

func (p Problem) Error() string { return p.Path + ": " + p.Text }

// Problems are the mistakes found so far. The zero value is empty.
type Problems []Problem

// Require adds a problem unless ok.
func (all *Problems) Require(ok bool, path, format string, args ...any) {
	if !ok {
		*all = append(*all, Problem{Path: path, Text: fmt.Sprintf(format, args...)})
	}
}

// Refuse adds a problem if a check has found one: an empty text means that there is none.
func (all *Problems) Refuse(path, text string) {
	if text != "" {
		*all = append(*all, Problem{Path: path, Text: text})
	}
}

// Join returns the problems as one error, nil if there are none.
func Join(all []Problem) error {
	mistakes := make([]error, len(all))
	for i, problem := range all {
		mistakes[i] = problem
	}
	return errors.Join(mistakes...)
}

// Add adds the problems of a part.
func (all *Problems) Add(part []Problem) { *all = append(*all, part...) }

// Differences are the names of the settings in which two configurations differ. The zero value is
// empty.
type Differences []string

// Compare adds a setting unless it is the same in both.
func (all *Differences) Compare(name string, same bool) {
	if !same {
		*all = append(*all, name)
	}
}
