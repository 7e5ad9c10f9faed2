package consumer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A DecodeOption changes how [HandleJSON] reads payloads.
type DecodeOption func(*decoding)

// decoding says how payloads are read.
type decoding struct {
	strict bool
}

// Strict refuses payloads with fields that T does not have, with a field twice, or with bytes that are not UTF-8. Package
// json would ignore the first, take the last of the second, and replace the third. Names that differ in case only count as
// one field, because package json takes them for one.
func Strict() DecodeOption { return func(d *decoding) { d.strict = true } }

// HandleJSON registers a handler that gets the payload decoded from JSON, as package encoding/json does it; pattern and
// version are those of [Router.Handle]. Without options, fields that T does not have are passed over, so that a producer
// may add some.
//
// A payload that cannot be decoded is a [Permanent] error, and the handler does not run: invalid JSON, anything after the
// value, a value that does not fit its field, and null where T has no null. The error names the field or the place and
// never repeats a value, because it is stored, logged and answered.
func HandleJSON[T any](r *Router, pattern string, version int, handle func(ctx context.Context, event Event, payload T) error, options ...DecodeOption) {
	if handle == nil {
		r.Handle(pattern, version, nil) // says so
	}
	var d decoding
	for _, option := range options {
		option(&d)
	}
	decode := d.decode
	if !nullable(reflect.TypeFor[T]()) {
		decode = d.decodeNotNull
	}
	r.Handle(pattern, version, func(ctx context.Context, event Event, payload []byte) error {
		var decoded T
		if err := decode(payload, &decoded); err != nil {
			return Permanent(fmt.Errorf("decode payload: %w", err))
		}
		return handle(ctx, event, decoded)
	})
}

// nullable reports whether null means something to a type. To the others package json leaves the zero value, of which a
// handler would make an effect.
func nullable(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Interface:
		return true
	}
	return reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]())
}

func (d decoding) decodeNotNull(payload []byte, into any) error {
	if string(bytes.TrimSpace(payload)) == "null" {
		return errors.New("the payload is null")
	}
	return d.decode(payload, into)
}

func (d decoding) decode(payload []byte, into any) error {
	if !d.strict {
		return withoutValues(json.Unmarshal(payload, into))
	}
	if !utf8.Valid(payload) {
		return errors.New("the payload is not UTF-8")
	}
	if !json.Valid(payload) { // here as well as below, for what follows the value
		return withoutValues(json.Unmarshal(payload, new(any)))
	}
	if err := noFieldTwice(payload); err != nil {
		return err
	}
	decoder := json.NewDecoder(bytes.NewReader(payload))
	decoder.DisallowUnknownFields()
	return withoutValues(decoder.Decode(into))
}

// withoutValues says what an error of package json says, except for the value: a person's data must not get into a log
// because it is malformed.
func withoutValues(err error) error {
	var syntax *json.SyntaxError
	var mismatch *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &syntax):
		return fmt.Errorf("the payload is not JSON: mistake at byte %d", syntax.Offset)
	case errors.As(err, &mismatch):
		kind, _, _ := strings.Cut(mismatch.Value, " ") // "number 4711"
		if mismatch.Field == "" {
			return fmt.Errorf("a JSON %s at byte %d does not fit %v", kind, mismatch.Offset, mismatch.Type)
		}
		return fmt.Errorf("field %q: a JSON %s at byte %d does not fit %v", mismatch.Field, kind, mismatch.Offset, mismatch.Type)
	}
	if field, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return fmt.Errorf("field %s is unknown", field)
	}
	return fmt.Errorf("a field's own decoder refused its value (%T)", err) // whose text may repeat it
}

// noFieldTwice refuses objects that name a field twice. payload is valid JSON.
func noFieldTwice(payload []byte) error {
	decoder := json.NewDecoder(bytes.NewReader(payload))
	decoder.UseNumber()
	var open []map[string]bool // the names in each open object; nil for arrays
	name := false              // the next token of the innermost object is a name
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return withoutValues(err)
		}
		switch token {
		case json.Delim('{'):
			open, name = append(open, map[string]bool{}), true
			continue
		case json.Delim('['):
			open, name = append(open, nil), false
			continue
		case json.Delim('}'), json.Delim(']'):
			open = open[:len(open)-1]
		default:
			if name {
				text, _ := token.(string)
				names := open[len(open)-1]
				if names[foldCase(text)] {
					return fmt.Errorf("field %q stands twice in one object, the second time before byte %d", text, decoder.InputOffset())
				}
				names[foldCase(text)] = true
				name = false
				continue
			}
		}
		name = len(open) > 0 && open[len(open)-1] != nil
	}
}

// foldCase makes texts equal that differ in case only, as package json compares names of fields.
func foldCase(text string) string {
	return strings.Map(func(r rune) rune {
		for {
			next := unicode.SimpleFold(r)
			if next <= r {
				return next // the smallest of those that are equal
			}
			r = next
		}
	}, text)
}
