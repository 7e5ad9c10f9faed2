// Package archive moves settled events into the archive, drops its old months, and prunes the log
// of attempts and a receiver's memory of duplicates. It works in small batches and stands down
// while the database is under pressure. What is pending, parked, held or failed is never removed by
// time alone.
package archive
