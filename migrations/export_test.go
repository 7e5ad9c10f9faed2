package migrations

// NewOver is New with files of a test in place of the set's.
var NewOver = newMigrator

// SelectHolders is the statement that asks for whom a connection waits.
const SelectHolders = selectHolders
