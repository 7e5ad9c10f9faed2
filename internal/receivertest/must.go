package receivertest

// Must returns value. It panics when err is not nil.
func Must[T any](value T, err error) T {
	if err != nil {
		panic(err.Error())
	}
	return value
}
