package consumer

import (
	"context"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// FuzzHandleJSON lets any payload come. The handler gets what package json makes of it, and no error repeats a value.
func FuzzHandleJSON(f *testing.F) {
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
	var got invoice
	router := NewRouter()
	HandleJSON(router, "invoice", 0, func(_ context.Context, _ pgx.Tx, _ Event, decoded invoice) error {
		got = decoded
		return nil
	})
	f.Fuzz(func(t *testing.T, payload string) {
		var want invoice
		errJSON := json.Unmarshal([]byte(payload), &want)
		isNull := strings.Trim(payload, " \t\r\n") == "null"
		err := router.Dispatch(t.Context(), nil, Event{Type: "invoice", Payload: []byte(payload)})
		if (err == nil) != (errJSON == nil && !isNull) || err == nil && !reflect.DeepEqual(want, got) {
			t.Errorf("%q: %v; package json: %v", payload, err, errJSON)
		}
		if strings.Contains(payload, "canary") || strings.Contains(payload, "47114711") {
			return // as a name, it may come back
		}
		// A value planted where it does not fit must not come back.
		planted, _ := json.Marshal(map[string]any{"amount": "canary" + payload, "lines": []any{map[string]any{"count": 47114711}}})
		for _, p := range [][]byte{planted, append([]byte(`{"number":"canary"}`), payload...), []byte(`{"count":"canary","n":47114711.` + payload + `}`)} {
			err := router.Dispatch(t.Context(), nil, Event{Type: "invoice", Payload: p})
			if err != nil && (strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "47114711")) {
				t.Errorf("%q: the error repeats a value: %v", p, err)
			}
		}
	})
}
