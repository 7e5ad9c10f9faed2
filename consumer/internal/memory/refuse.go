package memory

import (
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// refuses reports whether query is one that the handler may not send: it would do what Commit or
// Rollback are refused. Only what says so with its first word is noticed here; anything else shows
// at the end.
func (t *handlerTx) refuses(query string) bool {
	refused, undoes := endsTransaction(query)
	if undoes {
		t.rolledBack.Store(true) // as after Rollback
	}
	return refused
}

const blank = " \t\n\r\f"

// endsTransaction reports whether query says that it ends a transaction or begins one, and whether
// it is to undo what was done. ROLLBACK TO a savepoint is neither.
func endsTransaction(query string) (ends, undoes bool) {
	query = strings.TrimLeft(query, blank)
	first, rest := query, ""
	if end := strings.IndexAny(query, blank+";"); end >= 0 {
		first, rest = query[:end], query[end:]
	}
	if len(first) > len("ROLLBACK") {
		return false, false
	}
	switch strings.ToUpper(first) {
	case "COMMIT", "END", "BEGIN", "START":
		return true, false
	case "ABORT":
		return true, true
	case "PREPARE":
		words := strings.Fields(rest)
		return len(words) > 0 && strings.EqualFold(words[0], "TRANSACTION"), false
	case "ROLLBACK":
		to := slices.ContainsFunc(strings.Fields(rest), func(word string) bool { return strings.EqualFold(word, "TO") })
		return !to, !to
	}
	return false, false
}

// refusal is what comes of a statement that is not sent.
func refusal() pgx.BatchResults { return pgx.FailedBatchResults(&pgx.Batch{}, ErrMiddlewareCommits) }
