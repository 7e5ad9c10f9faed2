package consumer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// HandleJSON registers a handler that gets the payload decoded by package encoding/json. The
// pattern and the version are those of [Router.Handle]. Fields that T lacks are ignored, so a
// producer may add some.
//
// A payload that cannot be decoded is a [Permanent] error, and the handler does not run. That
// includes invalid JSON, text after the value, a value that does not fit its field, and null where
// T has no null. The error names the field or the position. It never repeats a value, because
// errors are stored, logged and sent.
func HandleJSON[T, Tx any](r *Router[Tx], pattern string, version int, handle func(ctx context.Context, tx Tx, event Event, payload T) error) {
	if handle == nil {
		r.Handle(pattern, version, nil) // panics with a message that names the pattern
	}
	acceptsNull := nullable(reflect.TypeFor[T]())
	r.Handle(pattern, version, func(ctx context.Context, tx Tx, event Event) error {
		if !acceptsNull && string(bytes.TrimSpace(event.Payload)) == "null" {
			return Permanent(errors.New("decode payload: the payload is null"))
		}
		var decoded T
		if err := json.Unmarshal(event.Payload, &decoded); err != nil {
			return Permanent(fmt.Errorf("decode payload: %w", withoutValues(err)))
		}
		return handle(ctx, tx, event, decoded)
	})
}

// nullable reports whether a type can hold null. Package json leaves the zero value in any other
// type, which a handler would take for data.
func nullable(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Interface:
		return true
	}
	return reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]())
}

// withoutValues returns the message of an error of package json without the value. A malformed
// payload must not put personal data into a log.
func withoutValues(err error) error {
	var syntax *json.SyntaxError
	var mismatch *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("the payload is not JSON: mistake at byte %d", syntax.Offset)
	case errors.As(err, &mismatch):
		kind, _, _ := strings.Cut(mismatch.Value, " ") // "number 4711"
		if mismatch.Field == "" {
			return fmt.Errorf("a JSON %s at byte %d does not fit %v", kind, mismatch.Offset, mismatch.Type)
		}
		return fmt.Errorf("field %q: a JSON %s at byte %d does not fit %v", mismatch.Field, kind, mismatch.Offset, mismatch.Type)
	}
	return fmt.Errorf("a field's own decoder refused its value (%T)", err) // whose text may repeat it
}
