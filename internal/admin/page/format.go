package page

import (
	"encoding/json"
	"fmt"
	"html/template"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// functions are what templates call.
func (p *Page) functions() template.FuncMap {
	return template.FuncMap{
		"path":  func(parts ...string) string { return p.Prefix + strings.Join(parts, "") },
		"asset": func(name string) string { return p.Prefix + "/static/" + name + "?v=" + p.assets[name].sum },
		"count": count,
		"bound": bound, "atleast": atLeast,
		"plural": func(n int64, one, many string) string {
			return count(n) + " " + map[bool]string{true: one, false: many}[n == 1]
		},
		"title":     func(word string) string { return strings.ToUpper(word[:1]) + word[1:] },
		"span":      span,
		"took":      took,
		"tail":      tail,
		"flow":      flow,
		"rate":      perSecond,
		"when":      when,
		"iso":       iso,
		"spark":     spark,
		"tone":      tone,
		"tree":      jsonTree,
		"selection": selection,
		"text":      text,
		"json":      asJSON,
		"target":    p.target,
		"line":      plain.Line,
		"upto":      func(s string, n int) string { return plain.Shorten(plain.Line(s), n) },
		"dict":      dict,
	}
}

// count writes a number with narrow blanks between thousands.
func count(n int64) string {
	digits := strconv.FormatInt(n, 10)
	for at := len(digits) - 3; at > 0 && digits[at-1] != '-'; at -= 3 {
		digits = digits[:at] + "\u202f" + digits[at:]
	}
	return digits
}

// atLeast writes how many failed, which is counted up to a bound at each destination.
func atLeast(n int64) string {
	if n > ops.FailedTo {
		return count(n/ops.FailedTo*ops.FailedTo) + "+"
	}
	return count(n)
}

// bound writes what the status counts up to a bound, or a sum of such counts.
func bound(n int64) string {
	if n > ops.CountedTo {
		return count(n-1) + "+"
	}
	return count(n)
}

// span writes seconds in their two largest units.
func span(seconds float64) string {
	if seconds > 0 && seconds < 1 {
		return "< 1s"
	}
	return plain.Span(time.Duration(seconds * float64(time.Second)))
}

// took writes a short time in seconds; nil is a dash.
func took(seconds *float64) string {
	switch {
	case seconds == nil:
		return "–"
	case *seconds < 0.01:
		return fmt.Sprintf("%.1f ms", *seconds*1000)
	case *seconds < 1:
		return fmt.Sprintf("%.0f ms", *seconds*1000)
	}
	return fmt.Sprintf("%.1f s", *seconds)
}

// tail writes the slow end of a distribution, with one unit where both have the same.
func tail(p95, p99 *float64) string {
	slow, slowest := took(p95), took(p99)
	if number, found := strings.CutSuffix(slow, " ms"); found && strings.HasSuffix(slowest, " ms") {
		slow = number
	}
	return "p95 " + slow + " · p99 " + slowest
}

// perSecond writes a limit; none is empty.
func perSecond(limit *float64) string {
	if limit == nil || *limit == 0 {
		return ""
	}
	return fmt.Sprintf("%.3g/s", *limit)
}

// flow writes how many requests a destination may have at once, and in a second; nil is a dash.
func flow(concurrency *int, limit *float64) string {
	if concurrency == nil || *concurrency == 0 { // held
		return "–"
	}
	text := strconv.Itoa(*concurrency)
	if rate := perSecond(limit); rate != "" {
		text += " · " + rate
	}
	return text
}

// when writes how long ago a time was, or in how long it comes. Nil is a dash.
func when(at any) string {
	moment, known := timeOf(at)
	if !known {
		return "–"
	}
	switch d := time.Since(moment); {
	case d >= 0 && d < 2*time.Second, d < 0 && d > -2*time.Second:
		return "now"
	case d < 0:
		return "in " + plain.Span(-d)
	default:
		return plain.Span(d) + " ago"
	}
}

// iso writes a time exactly, in UTC.
func iso(at any) string {
	moment, known := timeOf(at)
	if !known {
		return ""
	}
	return moment.UTC().Format("2006-01-02 15:04:05.000 UTC")
}

func timeOf(at any) (time.Time, bool) {
	switch at := at.(type) {
	case time.Time:
		return at, !at.IsZero()
	case *time.Time:
		if at != nil {
			return *at, true
		}
	}
	return time.Time{}, false
}

// text dereferences a text.
func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// spark writes the last points of a series as a path in a box that is 100 wide and 24 high. A point
// that stands alone is a dot.
func spark(series []*float64) string {
	highest := 1.0
	for _, y := range series {
		if y != nil {
			highest = max(highest, *y)
		}
	}
	var path strings.Builder
	for i, y := range series {
		switch {
		case y == nil:
		case i == 0 || series[i-1] == nil:
			fmt.Fprintf(&path, "M%.1f %.1fh.1", float64(i)*100/float64(max(1, len(series)-1)), 22-*y/highest*20)
		default:
			fmt.Fprintf(&path, "L%.1f %.1f", float64(i)*100/float64(max(1, len(series)-1)), 22-*y/highest*20)
		}
	}
	return path.String()
}

// tone returns how a state looks: good, bad, odd (a person should look) or plain.
func tone(state string) string {
	switch state {
	case "ok", "delivered", "busy", "idle", "asleep", "done":
		return "good"
	case "held", "failing", "unserved", "failed", "quarantined", "silent":
		return "bad"
	case "pending", "discarded", "running", "resolved":
		return "plain"
	}
	return "odd"
}

// selection writes what an operation was for.
func selection(s *ops.Selection) string {
	var all []string
	add := func(name, value string) {
		if value != "" {
			all = append(all, name+" "+value)
		}
	}
	at := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return t.UTC().Format(time.RFC3339)
	}
	if n := len(s.EventIDs); n > 0 {
		ids := strings.ReplaceAll(strings.Trim(fmt.Sprint(s.EventIDs[:min(n, 10)]), "[]"), " ", ", ")
		if n > 10 {
			ids += fmt.Sprintf(" and %d more", n-10)
		}
		add(map[bool]string{true: "event", false: "events"}[n == 1], ids)
	}
	add("destination", s.Destination)
	if s.Parked {
		all = append(all, "parked")
	}
	add("status", strings.Join(s.Statuses, ", "))
	add("type", s.Type)
	add("reason", s.Reason)
	add("ordering key", s.OrderingKey)
	add("since", at(s.Since))
	add("until", at(s.Until))
	if s.Limit > 0 {
		add("at most", count(s.Limit))
	}
	if s.Rate != nil {
		add("at", count(*s.Rate)+" a second")
	}
	return strings.Join(all, " · ")
}

// asJSON writes data for a script, in an attribute, where html/template escapes it.
func asJSON(v any) (string, error) {
	body, err := json.Marshal(v)
	return string(body), err
}

// target returns where a destination's requests go, without what may be secret.
func (p *Page) target(destination string) string {
	if p.Targets == nil {
		return ""
	}
	return p.Targets()[destination]
}

// dict makes the argument of a template of several values.
func dict(pairs ...any) (map[string]any, error) {
	all := map[string]any{}
	for i := 0; i+1 < len(pairs); i += 2 {
		name, ok := pairs[i].(string)
		if !ok {
			return nil, fmt.Errorf("dict: %v is no name", pairs[i])
		}
		all[name] = pairs[i+1]
	}
	return all, nil
}
