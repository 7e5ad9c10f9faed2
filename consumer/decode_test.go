package consumer

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzDecode lets any payload come. The lenient decoder takes what package json takes, and the strict one takes less and
// means the same; neither repeats a value.
func FuzzDecode(f *testing.F) {
	type line struct {
		Article string
		Count   int8
	}
	type invoice struct {
		Number string
		Amount int64
		Lines  []line
		Notes  map[string]string
		Due    *string
	}
	for _, seed := range []string{
		`{"number":"1","amount":2,"lines":[{"article":"a","count":3}],"notes":{"a":"b"},"due":null}`, `{"number":"1"} {}`, `{"a":1,"A":1}`, `null`, ` 1 `,
		`{"lines":[{"count":300}]}`, `{"notes":{"a":"1","a":"2"}}`, `[[[{"x":{"y":[]}}]]]`, `{"\u0061mount":1,"amount":2}`, "{\"number\":\"\xff\"}", `{"K":1}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		var want, lenient, strict invoice
		errJSON := json.Unmarshal([]byte(payload), &want)
		errLenient := decoding{}.decode([]byte(payload), &lenient)
		if (errJSON == nil) != (errLenient == nil) || errJSON == nil && !reflect.DeepEqual(want, lenient) {
			t.Errorf("%q: %v; package json: %v", payload, errLenient, errJSON)
		}
		errStrict := decoding{strict: true}.decode([]byte(payload), &strict)
		if errStrict == nil && (errLenient != nil || !reflect.DeepEqual(strict, lenient) || !utf8.ValidString(payload)) {
			t.Errorf("%q: strictly %+v, leniently %+v, %v", payload, strict, lenient, errLenient)
		}
		if strings.Contains(payload, "canary") || strings.Contains(payload, "47114711") {
			return // as a name, it may come back
		}
		// A value planted where it does not fit must not come back.
		planted, _ := json.Marshal(map[string]any{"amount": "canary" + payload, "lines": []any{map[string]any{"count": 47114711}}})
		for _, strictly := range []bool{false, true} {
			d := decoding{strict: strictly}
			for _, p := range [][]byte{planted, append([]byte(`{"number":"canary"}`), payload...), []byte(`{"count":"canary","n":47114711.` + payload + `}`)} {
				err := d.decode(p, new(invoice))
				if err != nil && (strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "47114711")) {
					t.Errorf("%q: the error repeats a value: %v", p, err)
				}
			}
		}
	})
}
