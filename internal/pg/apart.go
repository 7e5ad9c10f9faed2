package pg

// maxAlone bounds how many elements [Apart] finds one by one: each costs some statements. Where
// more fail, the rest of the list is not divided any further.
const maxAlone = 50

// IsOfRows reports whether a statement that failed may succeed without some of its rows: they
// cannot be read, or a constraint or a trigger refuses them. A lock is no such case: each part of
// the statement would wait for it once more. Neither is an error that ends the connection.
func IsOfRows(err error) bool {
	class := ClassifyError(err)
	return !OutcomeUnknown(err) && (class == ErrorDamaged || class == ErrorRefused && !HasCode(err, LockNotAvailable))
}

// Apart calls do with the list. After an error of some rows (see [IsOfRows]) it calls do with one
// half and then with the other, and so on, so that such rows keep no element from being worked on
// but their own. It calls alone with each of these. Any other error ends it, and is returned.
func Apart[T any](list []T, do func(part []T) error, alone func(one T, err error)) error {
	found := 0
	var divide func(part []T) error
	divide = func(part []T) error {
		err := do(part)
		if !IsOfRows(err) {
			return err
		}
		if len(part) == 1 || found >= maxAlone {
			found += len(part)
			for _, one := range part {
				alone(one, err)
			}
			return nil
		}
		half := len(part) / 2
		if err := divide(part[:half]); err != nil {
			return err
		}
		return divide(part[half:])
	}
	if len(list) == 0 {
		return nil
	}
	return divide(list)
}
