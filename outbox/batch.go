package outbox

import (
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"
)

// A batch is the valid events of one call, each key once, on their way into one statement.
type batch struct {
	events    []Event
	index     []int    // of each event among the caller's
	keys      []string // of all the caller's events
	duplicate []bool   // of all the caller's events: nothing was written for it
}

// newBatch refuses invalid events, those with headers that are not among the given ones too, and a
// key that the call itself gives to two different events.
func newBatch(events []Event, headers []string) (*batch, error) {
	b := &batch{duplicate: make([]bool, len(events))}
	first := make(map[string]*Event, len(events))
	var invalid, reused []error
	now := time.Now()
	for i := range events {
		event := &events[i]
		if err := event.validate(i, now, headers); err != nil {
			invalid = append(invalid, err)
			continue
		}
		b.keys = append(b.keys, event.IdempotencyKey)
		if other := first[event.IdempotencyKey]; other != nil {
			b.duplicate[i] = true
			if fields := event.contentDiffers(other); len(fields) > 0 {
				reused = append(reused, &KeyReusedError{Index: i, IdempotencyKey: event.IdempotencyKey, Fields: fields})
			}
			continue
		}
		first[event.IdempotencyKey] = event
		b.events = append(b.events, *event)
		b.index = append(b.index, i)
	}
	if len(invalid) > 0 {
		return nil, errors.Join(invalid...)
	}
	return b, errors.Join(reused...)
}

// traceHeaders are the names of a trace context: W3C Trace Context and W3C Baggage.
var traceHeaders = [...]string{"traceparent", "tracestate", "baggage"}

// withoutTrace returns the headers that are content. The names are matched in any case.
func withoutTrace(headers map[string]string) map[string]string {
	content := maps.Clone(headers)
	maps.DeleteFunc(content, func(name, _ string) bool {
		for _, trace := range traceHeaders {
			if strings.EqualFold(name, trace) {
				return true
			}
		}
		return false
	})
	return content
}

// addTrace adds a trace context to the events without one. What cannot be a header or would not fit
// is left out.
func (b *batch) addTrace(trace map[string]string) {
	folded := make(map[string]string, len(trace))
	for name, value := range trace {
		folded[strings.ToLower(name)] = value // carriers over http.Header write Traceparent
	}
	for i := range b.events {
		own := b.events[i].Headers
		if len(withoutTrace(own)) < len(own) {
			continue // parts of two contexts would be a third one that never existed
		}
		headers := make(map[string]string, len(own)+len(traceHeaders))
		maps.Copy(headers, own)
		for _, name := range traceHeaders {
			value := folded[name]
			if value == "" || strings.ContainsFunc(value, notPrintable) {
				continue
			}
			headers[name] = value
			if len(headersText(headers)) > maxHeadersBytes {
				delete(headers, name)
			}
		}
		b.events[i].Headers = headers
	}
}

// arguments returns one PostgreSQL array literal for each column. Text is what every driver of
// database/sql passes on unaltered, in every mode of its protocol.
func (b *batch) arguments() []any {
	var columns [8][]byte
	separator := byte('{')
	for i := range b.events {
		event := &b.events[i]
		for c := range columns {
			columns[c] = append(columns[c], separator)
		}
		separator = ','
		columns[0] = appendQuoted(columns[0], event.Type)
		columns[1] = strconv.AppendInt(columns[1], int64(event.version()), 10)
		columns[2] = appendQuoted(columns[2], event.Payload)
		columns[3] = appendQuoted(columns[3], event.IdempotencyKey)
		columns[4] = appendOrNull(columns[4], event.OrderingKey)
		columns[5] = appendOrNull(columns[5], event.RelatedReference)
		columns[6] = appendQuoted(columns[6], headersText(event.Headers))
		availableAt := "" // the database's now()
		if !event.AvailableAt.IsZero() {
			availableAt = event.AvailableAt.UTC().Format("2006-01-02T15:04:05.000000Z07:00")
		}
		columns[7] = appendOrNull(columns[7], availableAt)
	}
	arguments := make([]any, len(columns))
	for c := range columns {
		arguments[c] = string(append(columns[c], '}'))
	}
	return arguments
}

func appendOrNull(text []byte, s string) []byte {
	if s == "" {
		return append(text, "NULL"...)
	}
	return appendQuoted(text, s)
}

// A stored row is what the table holds under the key of one event.
type stored struct {
	position  int // of the event in the batch
	found     bool
	writtenBy int64    // the number of this transaction's command that wrote it, or -1
	differs   []string // fields that are not the event's
}

// judge finds the duplicates among the rows and refuses reused keys.
func (b *batch) judge(inserted int, rows []stored) error {
	insert := int64(-1) // the number of the command that inserted this batch
	if inserted > 0 {
		for _, row := range rows {
			insert = max(insert, row.writtenBy)
		}
	}
	var reused []error
	var lost []string
	for _, row := range rows {
		index, key := b.index[row.position], b.events[row.position].IdempotencyKey
		switch {
		case !row.found:
			lost = append(lost, quote(key))
		case insert >= 0 && row.writtenBy == insert:
		case len(row.differs) > 0:
			reused = append(reused, &KeyReusedError{Index: index, IdempotencyKey: key, Fields: row.differs})
		default:
			b.duplicate[index] = true
		}
	}
	if len(lost) > 0 {
		// ON CONFLICT DO NOTHING also swallows a collision of ids, which must not pass for a
		// duplicate.
		return fmt.Errorf("outbox: insert events: %d were neither inserted nor found, the first with key %s; roll back and try "+
			"again, and if it stays so, see whether the sequence of outbox.id is behind its table, or a trigger or a "+
			"row-level policy hides rows", len(lost), lost[0])
	}
	return errors.Join(reused...)
}

// duplicates returns the keys for which nothing was written.
func (b *batch) duplicates() []string {
	var keys []string
	for i, duplicate := range b.duplicate {
		if duplicate {
			keys = append(keys, b.keys[i])
		}
	}
	return keys
}
