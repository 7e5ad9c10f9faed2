package post

import (
	"fmt"
	"strings"
	"time"
)

// Headers of CloudEvents 1.0 in binary mode
// (https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/http-protocol-binding.md).
const (
	ceSpecVersion  = "Ce-Specversion"
	ceID           = "Ce-Id"
	ceSource       = "Ce-Source"
	ceType         = "Ce-Type"
	ceTime         = "Ce-Time"
	ceSubject      = "Ce-Subject"
	cePartitionKey = "Ce-Partitionkey" // of the partitioning extension
	ceSequence     = "Ce-Sequence"     // of the sequence extension
)

// isAttribute reports whether a canonical header name is one of the above. Other ce- headers of an
// event are extension attributes of its producer, and pass.
func isAttribute(name string) bool {
	switch name {
	case ceSpecVersion, ceID, ceSource, ceType, ceTime, ceSubject, cePartitionKey, ceSequence:
		return true
	}
	return false
}

// setAttributes adds the attributes of an event, whose fields are checked later. The id is the
// idempotency key, so that receivers that deduplicate by source and id do it by what identifies the
// event to its producer, too. A sequence is a text that is compared as one, hence the zeros.
func (r *Request) setAttributes(source string, d *Message) {
	e := &d.Event
	for _, a := range [...]field{
		{ceSpecVersion, "1.0"},
		{ceID, *e.Key},
		{ceSource, source},
		{ceType, *e.EventType},
		{ceTime, e.CreatedAt.Time.UTC().Format(time.RFC3339Nano)},
		{ceSubject, valueOrEmpty(e.RelatedReference)},
		{cePartitionKey, valueOrEmpty(e.OrderingKey)},
	} {
		r.deleteSpellings(a.name) // an event's own would say something else
		if a.value != "" {
			r.header = append(r.header, field{a.name, PercentEncode(a.value)})
		}
	}
	r.deleteSpellings(ceSequence)
	if e.OrderingKey != nil {
		r.header = append(r.header, field{ceSequence, fmt.Sprintf("%020d", d.EventID)})
	}
}

// PercentEncode writes a value as §3.1.3.2 of the binding asks: a blank, a quotation mark, a
// percent sign and every byte that is not printable ASCII as % and two digits.
func PercentEncode(s string) string {
	encode := func(c byte) bool { return c <= ' ' || c == '"' || c == '%' || c > '~' }
	i := 0
	for i < len(s) && !encode(s[i]) {
		i++
	}
	if i == len(s) {
		return s
	}
	var b strings.Builder
	for i := range len(s) {
		if encode(s[i]) {
			fmt.Fprintf(&b, "%%%02X", s[i])
		} else {
			b.WriteByte(s[i])
		}
	}
	return b.String()
}
