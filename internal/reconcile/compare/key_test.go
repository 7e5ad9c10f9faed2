package compare_test

import (
	"crypto/md5" //nolint:gosec // keys that look random, as the statements of the tests make them
	"encoding/hex"
	"strconv"
)

// key returns the key of a numbered event.
func key(n int) string {
	sum := md5.Sum([]byte(strconv.Itoa(n))) //nolint:gosec // as above
	return hex.EncodeToString(sum[:])
}
