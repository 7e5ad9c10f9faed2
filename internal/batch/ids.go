package batch

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// IDs are strings in JSON, as every id is: JavaScript and jq lose the last digits of large numbers.
// They are read from strings and from numbers.
type IDs []int64

// MarshalJSON implements [json.Marshaler].
func (ids IDs) MarshalJSON() ([]byte, error) {
	list := make([]string, len(ids))
	for i, id := range ids {
		list[i] = strconv.FormatInt(id, 10)
	}
	return json.Marshal(list)
}

// UnmarshalJSON implements [json.Unmarshaler].
func (ids *IDs) UnmarshalJSON(text []byte) error {
	var list []json.Number // which a string may hold, too
	if err := json.Unmarshal(text, &list); err != nil {
		return errors.New("event_ids: is not a list of ids")
	}
	if len(list) == 0 {
		return errors.New("event_ids: is empty; leave it out if the other conditions alone are meant")
	}
	*ids = nil
	for _, number := range list {
		id, err := strconv.ParseInt(number.String(), 10, 64)
		if err != nil || id < 1 {
			return fmt.Errorf("event_ids: %q is not the id of an event", plain.Clip(number.String()))
		}
		*ids = append(*ids, id)
	}
	return nil
}
