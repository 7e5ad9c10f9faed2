// Package output writes what commands found: as text and tables without control characters, as JSON
// with the data intact, and, on a terminal, in colours and over the line before.
package output
