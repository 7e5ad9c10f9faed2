package webhook

import "net/http"

// Refuses reports whether a receiver that answers a message with the status will never accept it,
// however often it comes: the rows "failed" of the table in docs/wire.md.
func Refuses(status int) bool {
	switch status {
	case http.StatusBadRequest, http.StatusNotAcceptable, http.StatusGone, http.StatusLengthRequired, http.StatusRequestEntityTooLarge,
		http.StatusRequestURITooLong, http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity, http.StatusRequestHeaderFieldsTooLarge,
		http.StatusNotImplemented:
		return true
	}
	return false
}
