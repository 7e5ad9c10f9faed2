package natspost

import (
	"fmt"
	"hash/fnv"
	"regexp"
	"strconv"
	"strings"
)

// What a template of subjects may hold.
const (
	typePlace        = "{type}"
	destinationPlace = "{destination}"
	partitionPlace   = "{partition}"
	subjectExample   = `write one such as "outbox.{type}"`
)

// maxPartitions bounds how many partitions there are: each is a consumer of the server.
const maxPartitions = 1024

// maxSubject bounds a subject, in bytes. A server's line of control is 4 KiB, and holds the subject
// of the answer, too.
const maxSubject = 1024

// templateProblem says what is wrong with a template of subjects; empty: nothing.
func templateProblem(template, destination string) string {
	if template == "" {
		return "is not set; " + subjectExample
	}
	rest := strings.NewReplacer(typePlace, "", destinationPlace, "", partitionPlace, "").Replace(template)
	if strings.ContainsAny(rest, "{}") {
		return fmt.Sprintf("%q holds a { that begins neither {type}, {destination} nor {partition}; %s", template, subjectExample)
	}
	if text := subjectProblem(expand(template, "t", destination, 0)); text != "" {
		return fmt.Sprintf("%q %s; %s", template, text, subjectExample)
	}
	return ""
}

// expand returns the subject of an event. A strings.Replacer would be built again for each. The
// type comes last: what it holds is no place.
func expand(template, eventType, destination string, partition uint32) string {
	subject := strings.ReplaceAll(template, destinationPlace, destination)
	subject = strings.ReplaceAll(subject, partitionPlace, strconv.FormatUint(uint64(partition), 10))
	return strings.ReplaceAll(subject, typePlace, eventType)
}

// partition returns the partition of what has the given order: an ordering key, or what stands for
// one. FNV-1a, so that another program can find it, too.
func (s Settings) partition(order string) uint32 {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(order)) // never fails
	return hash.Sum32() % uint32(max(s.Partitions, 1))
}

// subjectProblem says why no message can be published to a subject; empty: one can. An event's type
// becomes part of it, so that a producer must not reach the subjects of the server:
// "$JS.API.STREAM.DELETE.x" would be a command.
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
	case strings.ContainsFunc(subject, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "holds a blank or a character beyond printable ASCII"
	}
	return ""
}

// overlap reports whether some subject matches both patterns, in which '*' stands for a word and a
// last '>' for one or more.
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

var (
	fromType      = regexp.MustCompile(`[^.]*{type}.*`)
	partitionWord = regexp.MustCompile(`[^.]*{partition}[^.]*`)
)

// pattern returns what the subjects of a template have in common: a word that an event's type is
// part of is any, and a type may hold dots.
func pattern(template, destination string) string {
	subject := fromType.ReplaceAllString(strings.ReplaceAll(template, destinationPlace, destination), ">")
	return partitionWord.ReplaceAllString(subject, "*")
}
