package output

import (
	"io"
	"reflect"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// Show prints what a command found: as JSON with the data intact, or by write, which gets it as
// [Printable] text.
func Show[T any](w io.Writer, asJSON bool, found T, write func(io.Writer, T) error) error {
	if asJSON {
		return WriteJSON(w, found)
	}
	return write(w, Printable(found))
}

// Printable returns a copy of a value in which every string is [plain.Line], however deep: no
// column of a table can be forgotten, and none can begin a line.
func Printable[T any](value T) T {
	v := reflect.ValueOf(&value).Elem()
	v.Set(printableCopy(v))
	return value
}

func printableCopy(v reflect.Value) reflect.Value {
	c := reflect.New(v.Type()).Elem()
	c.Set(v)
	switch v.Kind() {
	case reflect.String:
		c.SetString(plain.Line(v.String()))
	case reflect.Pointer:
		if !v.IsNil() {
			c.Set(reflect.New(v.Type().Elem()))
			c.Elem().Set(printableCopy(v.Elem()))
		}
	case reflect.Interface:
		if !v.IsNil() {
			c.Set(printableCopy(v.Elem()))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if c.Field(i).CanSet() {
				c.Field(i).Set(printableCopy(v.Field(i)))
			}
		}
	case reflect.Slice:
		if v.IsNil() {
			break
		}
		c.Set(reflect.AppendSlice(reflect.MakeSlice(v.Type(), 0, v.Len()), v))
		fallthrough
	case reflect.Array:
		for i := range v.Len() {
			c.Index(i).Set(printableCopy(v.Index(i)))
		}
	case reflect.Map:
		if v.IsNil() {
			break
		}
		c.Set(reflect.MakeMap(v.Type()))
		for key, value := range v.Seq2() {
			c.SetMapIndex(printableCopy(key), printableCopy(value))
		}
	}
	return c
}

// A textWriter passes on printable lines only. It wraps the output streams of the process, for
// texts that a command did not make printable itself.
type textWriter struct {
	io.Writer
	colored bool // it is a terminal that shows colours
}

// NewTextWriter returns a textWriter, which paints if it may show colours.
func NewTextWriter(w io.Writer, colored bool) io.Writer { return textWriter{w, colored} }

func (w textWriter) Write(p []byte) (int, error) {
	var b strings.Builder
	for line := range strings.Lines(string(p)) {
		text, ended := strings.CutSuffix(line, "\n")
		b.WriteString(plain.Line(text))
		if ended {
			b.WriteByte('\n')
		}
	}
	if _, err := io.WriteString(w.Writer, b.String()); err != nil {
		return 0, err
	}
	return len(p), nil
}
