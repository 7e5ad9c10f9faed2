package consumer

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Version orders the events of one entity: [BySequence] or [ByTime]. The zero value is none and refused.
type Version struct {
	kind    versionKind
	number  int64 // the sequence, or what decides between equal times
	at      time.Time
	mistake string
}

type versionKind int

const (
	bySequence versionKind = iota + 1
	byTime
)

// BySequence makes a version of a number that grows with every event of the entity, such as [Event].Sequence or a revision
// in the payload. It is at least 1: 0 is what Event.Sequence says of an event without an ordering key, and would make every
// event after the first one stale.
func BySequence(n int64) Version {
	v := Version{kind: bySequence, number: n}
	if n < 1 {
		v.mistake = "a sequence is at least 1: does the producer set an ordering key?"
	}
	return v
}

// ByTime makes a version of when something happened and a number that decides between equal times, such as
// [Event].CreatedAt and [Event].ID, which grows within one outbox. Times are compared in microseconds, as PostgreSQL keeps
// them; what is shorter is dropped. t lies in the years 1 to 9999 and is not the zero time, which is what Event.CreatedAt
// says of a foreign sender's event.
//
// Times order events as well as the clocks they come from do. CreatedAt is when the producer's transaction began: of two
// that ran at the same time, the one that committed last may bear the earlier time. Where that matters, use a sequence.
func ByTime(t time.Time, tiebreak int64) Version {
	v := Version{kind: byTime, number: tiebreak, at: t.UTC().Truncate(time.Microsecond)}
	switch {
	case t.IsZero():
		v.mistake = "the time is zero: a foreign sender's event has none, take it from the payload"
	case v.at.Year() < 1 || v.at.Year() > 9999:
		v.mistake = "the time lies outside the years 1 to 9999"
	}
	return v
}

// String is the version as errors show it.
func (v Version) String() string {
	switch v.kind {
	case bySequence:
		return fmt.Sprintf("sequence %d", v.number)
	case byTime:
		return fmt.Sprintf("%s, %d", v.at.Format(time.RFC3339Nano), v.number)
	}
	return "no version"
}

func (v Version) check() error {
	switch {
	case v.kind == 0:
		return errors.New("the version is zero: make one with BySequence or ByTime")
	case v.mistake != "":
		return errors.New(v.mistake)
	}
	return nil
}

// checkName refuses what the table or an operator's terminal could not hold.
func checkName(what, name string) error {
	if len(name) < 1 || len(name) > maxTextBytes || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return fmt.Errorf("the %s must be 1 to %d bytes of UTF-8 without control characters", what, maxTextBytes)
	}
	return nil
}
