package consumer

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
)

// rewriter sends what it likes.
type rewriter struct{}

func (rewriter) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	return "COMMIT", nil, nil
}

// What is not certain to leave the transaction alone is in doubt; that costs a question at the end, and nothing else.
func TestStatementsThatEndNothing(t *testing.T) {
	t.Parallel()
	for query, want := range map[string]bool{
		"SELECT 1":                       true,
		"select 1":                       true,
		"Insert INTO effect VALUES (1)":  true,
		"UPDATE effect SET n = 1":        true,
		"DELETE FROM effect":             true,
		"MERGE INTO effect USING x ON y": true,
		"VALUES (1)":                     true,
		"VALUES(1)":                      true,
		"SELECT(1)":                      true,
		" \t\r\n\fSELECT\n1":             true,
		"WITH x AS (SELECT 1) INSERT INTO effect SELECT * FROM x": true,
		"with x as (select 1) select":                             true,

		"-- why\nSELECT 1":                   true,
		"-- why\rSELECT 1":                   true,
		"-- why\r\n\t-- and how\n SELECT 1":  true,
		"--\nSELECT 1 -- why":                true,
		"-- why\rROLLBACK AND CHAIN":         false,
		"-- why\rROLLBACK AND CHAIN\nSELECT": false,
		"-- SELECT 1":                        false,
		"-- SELECT 1\nCOMMIT":                false,
		"/* why */ SELECT 1":                 false,
		"/* why */ ROLLBACK AND CHAIN":       false,
		"SELECT/* why */1":                   false,
		"/* SELECT 1 */ COMMIT":              false,

		"SELECT 1;":                    true,
		"SELECT 1 ; ;\n":               true,
		"SELECT 1; SELECT 2":           false,
		"SELECT 1; ROLLBACK AND CHAIN": false,
		"SELECT 1;ROLLBACK AND CHAIN;": false,
		"; ROLLBACK AND CHAIN":         false,
		"SELECT 'a;b'":                 false,
		"SELECT 1 -- ;\n; COMMIT":      false,
		"(SELECT 1)":                   false,
		"(SELECT 1); COMMIT":           false,
		"\vSELECT 1":                   false,
		"\ufeffSELECT 1":               false,
		"":                             false,
		" ":                            false,
		";":                            false,
		"--":                           false,
		"ROLLBACK":                     false,
		"ROLLBACK AND CHAIN":           false,
		"ROLLBACK TO SAVEPOINT s":      false,
		"COMMIT AND CHAIN":             false,
		"commit":                       false,
		"END":                          false,
		"ABORT":                        false,
		"BEGIN":                        false,
		"START TRANSACTION":            false,
		"PREPARE TRANSACTION 'x'":      false,
		"SAVEPOINT s":                  false,
		"CALL work()":                  false,
		"DO $$ BEGIN END $$":           false,
		"EXECUTE finish":               false,
		"EXPLAIN ANALYZE SELECT 1":     false,
		"DELETE FROM processed_events": false,
		"delete from app.\"processed_events\" where true":   false,
		"WITH x AS (DELETE FROM Processed_Events) SELECT 1": false,
		"INSERT INTO effect VALUES ('of processed_events')": false,
		"finish":        false, // what a name stands for nobody knows
		"insert":        false,
		"VALUES":        false,
		"insert_effect": false,
		"selects 1":     false,
	} {
		if got := endsNothing(query); got != want {
			t.Errorf("%q: %v, want %v", query, got, want)
		}
	}
}

// Who replaces statements is handed the connection.
func TestArgumentsThatReplaceTheStatement(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args []any
		want bool
	}{
		"none":          {nil, false},
		"values":        {[]any{1, "a", nil, []byte("b")}, false},
		"a mode":        {[]any{pgx.QueryExecModeSimpleProtocol, 1}, false},
		"formats":       {[]any{pgx.QueryResultFormats{1}, 1}, false},
		"named":         {[]any{pgx.NamedArgs{"n": 1}}, false},
		"strictly":      {[]any{pgx.StrictNamedArgs{"n": 1}}, false},
		"mode, named":   {[]any{pgx.QueryExecModeExec, pgx.NamedArgs{"n": 1}}, false},
		"another":       {[]any{rewriter{}}, true},
		"mode, another": {[]any{pgx.QueryExecModeExec, &rewriter{}, 1}, true},
	} {
		if got := rewritten(test.args); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// What a handler may not send, and whether it asks to undo its work.
func TestStatementsThatAreRefused(t *testing.T) {
	t.Parallel()
	const passes, refused, undone = "passes", "is refused", "is refused, and undone"
	for query, want := range map[string]string{
		"COMMIT":                                refused,
		"commit":                                refused,
		" \t\r\n\fCommit Work;":                 refused,
		"COMMIT;":                               refused,
		"COMMIT; INSERT INTO effect VALUES (1)": refused,
		"COMMIT AND CHAIN":                      refused,
		"END":                                   refused,
		"BEGIN":                                 refused,
		"BEGIN ISOLATION LEVEL SERIALIZABLE":    refused,
		"START TRANSACTION":                     refused,
		"PREPARE TRANSACTION 'x'":               refused,
		"prepare\ntransaction 'x'":              refused,
		"ROLLBACK":                              undone,
		"rollback;":                             undone,
		"ROLLBACK AND CHAIN":                    undone,
		"ROLLBACK; SELECT 1":                    undone,
		"ABORT":                                 undone,
		"ABORT AND CHAIN":                       undone,

		"":                                     passes,
		";":                                    passes,
		"SAVEPOINT s":                          passes,
		"RELEASE SAVEPOINT s":                  passes,
		"ROLLBACK TO s":                        passes,
		"rollback to savepoint s":              passes,
		"ROLLBACK WORK TO SAVEPOINT s":         passes,
		"ROLLBACK TRANSACTION TO s":            passes,
		"PREPARE":                              passes,
		"PREPARE finish AS SELECT 1":           passes,
		"EXECUTE finish":                       passes,
		"INSERT INTO effect VALUES ('COMMIT')": passes,
		"commit_order":                         passes, // names of prepared statements
		"begin-work":                           passes,
		"rollbacks":                            passes,
		"endless":                              passes,
		"/* */ COMMIT":                         passes, // shows at the end
		"-- \nCOMMIT":                          passes,
		"SELECT 1; COMMIT":                     passes,
	} {
		got := passes
		if ends, undoes := endsTransaction(query); undoes {
			got = undone
		} else if ends {
			got = refused
		}
		if got != want {
			t.Errorf("%q %s, want that it %s", query, got, want)
		}
	}
}
