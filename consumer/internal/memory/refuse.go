package memory

import (
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// refuses reports whether query is one that the handler may not send: it would do what Commit or Rollback are refused. Only
// what says so with its first word is noticed here; anything else shows at the end.
func (t *handlerTx) refuses(query string) bool {
	refused, undoes := endsTransaction(query)
	if undoes {
		t.rolledBack.Store(true) // as after Rollback
	}
	return refused
}

const blank = " \t\n\r\f"

// endsTransaction reports whether query says that it ends a transaction or begins one, and whether it is to undo what was
// done. ROLLBACK TO a savepoint is neither.
func endsTransaction(query string) (ends, undoes bool) {
	query = withoutComments(query)
	first, rest := query, ""
	if end := strings.IndexAny(query, blank+";"); end >= 0 {
		first, rest = query[:end], query[end:]
	}
	for _, comment := range []string{"--", "/*"} {
		first, _, _ = strings.Cut(first, comment)
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

// withoutComments returns query from its first word on.
func withoutComments(query string) string {
	for depth := 0; ; {
		if depth == 0 {
			query = strings.TrimLeft(query, blank+";")
		}
		switch {
		case strings.HasPrefix(query, "/*"):
			depth, query = depth+1, query[2:]
		case depth > 0 && strings.HasPrefix(query, "*/"):
			depth, query = depth-1, query[2:]
		case depth > 0 && query != "":
			query = query[1:]
		case strings.HasPrefix(query, "--"):
			query = query[min(strings.IndexAny(query+"\n", "\r\n"), len(query)):]
		default:
			return query
		}
	}
}

// refusal is what comes of a statement that is not sent.
func refusal() pgx.BatchResults { return pgx.FailedBatchResults(&pgx.Batch{}, ErrMiddlewareCommits) }
