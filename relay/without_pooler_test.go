//go:build !pgbouncer

package relay

// putPoolerBefore puts a pooler before the database, if the test asks for one; without the build tag pgbouncer none does.
func (db *database) putPoolerBefore() {}
