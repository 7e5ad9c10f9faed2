package consumer

import (
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// judge notes whether a statement of the handler's leaves the transaction in doubt.
func (t *handlerTx) judge(query string, args []any) {
	switch {
	case rewritten(args):
		t.expose() // the rewriter is handed the connection
	case !t.doubtful.Load() && !endsNothing(query):
		t.doubtful.Store(true)
	}
}

// rewritten reports whether the arguments of a statement have it replaced by any other.
func rewritten(args []any) bool {
	return slices.ContainsFunc(args, func(arg any) bool {
		switch arg.(type) {
		case pgx.NamedArgs, pgx.StrictNamedArgs:
			return false
		}
		_, ok := arg.(pgx.QueryRewriter)
		return ok
	})
}

const blank = " \t\n\r\f"

// endsNothing reports whether query is certainly one statement, of a kind that neither ends a transaction nor begins one, and
// that leaves the memory of events alone.
func endsNothing(query string) bool {
	query = strings.TrimLeft(query, blank)
	for strings.HasPrefix(query, "--") {
		end := strings.IndexAny(query, "\n\r")
		if end < 0 {
			return false
		}
		query = strings.TrimLeft(query[end:], blank)
	}
	if strings.Contains(strings.TrimRight(query, blank+";"), ";") {
		return false
	}
	end := strings.IndexAny(query, blank+"(")
	if end < 0 {
		return false // a single word may be the name of a prepared statement
	}
	switch strings.ToUpper(query[:end]) {
	case "SELECT", "INSERT", "UPDATE", "DELETE", "MERGE", "WITH", "VALUES":
		return !strings.Contains(strings.ToLower(query), "processed_events")
	}
	return false
}

// refuses reports whether query is one that the handler may not send: it would do what Commit or Rollback are refused. Only
// what says so with its first word is noticed here; anything else shows at the end.
func (t *handlerTx) refuses(query string) bool {
	refused, undoes := endsTransaction(query)
	if undoes {
		t.rolledBack.Store(true) // as after Rollback
	}
	return refused
}

// endsTransaction reports whether query says that it ends a transaction or begins one, and whether it is to undo what was
// done. ROLLBACK TO a savepoint is neither.
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
