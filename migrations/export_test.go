package migrations

// NewOver is New with files of a test in place of the set's.
var NewOver = newMigrator
