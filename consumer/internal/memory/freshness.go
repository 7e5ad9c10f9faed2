package memory

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
)

// Version is consumer.Version.
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

// BySequence is consumer.BySequence.
func BySequence(n int64) Version {
	v := Version{kind: bySequence, number: n}
	if n < 1 {
		v.mistake = "a sequence is at least 1: does the producer set an ordering key?"
	}
	return v
}

// ByTime is consumer.ByTime.
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
	if len(name) < 1 || len(name) > headers.MaxTextBytes || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return fmt.Errorf("the %s must be 1 to %d bytes of UTF-8 without control characters", what, headers.MaxTextBytes)
	}
	return nil
}
