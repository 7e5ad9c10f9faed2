package intake

import (
	"encoding/json"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// The rules of an event. Domains of outbox keep those of the type and the key too, so that an event
// which breaks them can be neither named nor routed.
const (
	RuleAvailable = "outbox_available_at_is_in_year_1_to_366_days_ahead"
	RuleType      = "outbox_event_type_is_1_to_255_printable_ascii_no_blanks"
	RuleVersion   = "outbox_event_version_is_positive"
	RuleHeaders   = "outbox_headers_have_unreserved_names_and_printable_values"
	RuleID        = "outbox_id_is_positive"
	RuleKey       = "outbox_idempotency_key_is_1_to_255_printable_ascii"
	RuleOrdering  = "outbox_ordering_key_is_1_to_255_printable_ascii"
	RuleReference = "outbox_related_reference_is_1_to_255_printable_ascii"
	RulePayload   = "outbox_payload_is_at_most_1_mib"
)

const (
	maxText    = 255
	maxHeaders = 8192
	maxPayload = 1 << 20
	maxAhead   = 366 * 24 * time.Hour
)

// BrokenRule returns the name of the first rule that an event breaks, in the order of their names;
// empty: it breaks none. An event that breaks one has no route: it fails under that name.
func BrokenRule(e *Event) string {
	switch {
	case !isNear(e.AvailableAt, e.CreatedAt):
		return RuleAvailable
	case e.EventType == nil || !isText(*e.EventType) || strings.Contains(*e.EventType, " "):
		return RuleType
	case e.Version == nil || *e.Version < 1:
		return RuleVersion
	case e.Headers != nil && !areFit(e.Headers):
		return RuleHeaders
	case e.ID < 1:
		return RuleID
	case e.Key == nil || !isText(*e.Key):
		return RuleKey
	case e.OrderingKey != nil && !isText(*e.OrderingKey):
		return RuleOrdering
	case e.RelatedReference != nil && !isText(*e.RelatedReference):
		return RuleReference
	case e.PayloadBytes > maxPayload:
		return RulePayload
	}
	return ""
}

// MayHoldKey reports whether a row of an event can have its ordering key. No index could hold a row
// with a key of any length, so that what has a longer one could never be written.
func (e *Event) MayHoldKey() bool { return e.OrderingKey == nil || len(*e.OrderingKey) <= maxText }

func isNear(available, created pgtype.Timestamptz) bool {
	if available.InfinityModifier != pgtype.Finite || available.Time.UTC().Year() < 1 {
		return false
	}
	return !available.Time.After(created.Time.Add(maxAhead))
}

// isText reports whether a text arrives unchanged as the value of a header: printable ASCII without
// blanks around it.
func isText(s string) bool {
	return len(s) >= 1 && len(s) <= maxText && isPrintable(s) && s[0] != ' ' && s[len(s)-1] != ' '
}

func isPrintable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// areFit reports whether the headers of an event, as PostgreSQL prints them, are an object of
// strings with names that an event may bring.
func areFit(headers []byte) bool {
	if len(headers) > maxHeaders || headers[0] != '{' {
		return false
	}
	var values map[string]*string
	if json.Unmarshal(headers, &values) != nil {
		return false
	}
	for name, value := range values {
		if value == nil || !isPrintable(*value) || !isToken(name) || webhook.ReservedForEvents(name) {
			return false
		}
	}
	return true
}

// isToken reports whether HTTP allows a name of a header.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && !strings.Contains("!#$%&'*+-.^_`|~", string(rune(c))) {
			return false
		}
	}
	return s != ""
}
