package natspost

import (
	"fmt"
	"strings"
)

// What a template of subjects may hold.
const (
	typePlace        = "{type}"
	destinationPlace = "{destination}"
	subjectExample   = `write one such as "outbox.{type}"`
)

// maxSubject bounds a subject, in bytes. A server's line of control is 4 KiB, and holds the subject of the answer, too.
const maxSubject = 1024

// templateProblem says what is wrong with a template of subjects; empty: nothing.
func templateProblem(template, destination string) string {
	if template == "" {
		return "is not set; " + subjectExample
	}
	rest := strings.NewReplacer(typePlace, "", destinationPlace, "").Replace(template)
	if strings.ContainsAny(rest, "{}") {
		return fmt.Sprintf("%q holds a { that begins neither {type} nor {destination}; %s", template, subjectExample)
	}
	if text := subjectProblem(expand(template, "t", destination)); text != "" {
		return fmt.Sprintf("%q %s; %s", template, text, subjectExample)
	}
	return ""
}

// expand returns the subject of an event type. A strings.Replacer would be built anew for each event.
func expand(template, eventType, destination string) string {
	if !strings.Contains(template, "{") {
		return template
	}
	return strings.ReplaceAll(strings.ReplaceAll(template, destinationPlace, destination), typePlace, eventType)
}

// subjectProblem says why no message can be published to a subject; empty: one can. An event's type becomes part of it, so that a
// producer must not reach the subjects of the server: "$JS.API.STREAM.DELETE.x" would be a command.
func subjectProblem(subject string) string {
	switch {
	case len(subject) > maxSubject:
		return fmt.Sprintf("is longer than %d bytes", maxSubject)
	case strings.HasPrefix(subject, "$"), strings.HasPrefix(subject, "_"):
		return "begins with a sign of the server's own subjects, '$' or '_'"
	case strings.HasPrefix(subject, "."), strings.HasSuffix(subject, "."), strings.Contains(subject, ".."):
		return "has an empty word between its dots"
	case strings.ContainsAny(subject, "*>"):
		return "holds a wildcard, '*' or '>'"
	}
	for i := range len(subject) {
		if subject[i] <= ' ' || subject[i] > '~' {
			return "holds a blank or a character beyond printable ASCII"
		}
	}
	return ""
}

// overlap reports whether some subject matches both patterns, in which '*' stands for a word and a last '>' for one or more.
func overlap(a, b string) bool {
	one, other := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; ; i++ {
		switch {
		case i == len(one) || i == len(other):
			return len(one) == len(other)
		case one[i] == ">" || other[i] == ">":
			return true
		case one[i] != other[i] && one[i] != "*" && other[i] != "*":
			return false
		}
	}
}

// pattern returns what the subjects of a template have in common: a word that an event's type is part of is any, and a type may
// hold dots.
func pattern(template, destination string) string {
	words := strings.Split(strings.ReplaceAll(template, destinationPlace, destination), ".")
	for i, word := range words {
		if strings.Contains(word, typePlace) {
			return strings.Join(append(words[:i:i], ">"), ".")
		}
	}
	return strings.Join(words, ".")
}
