package memory

import "testing"

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
