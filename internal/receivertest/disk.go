package receivertest

// SampleCommits notes what synchronous_commit is when a transaction commits that has inserted into
// table: a deferred trigger runs then.
func (e *Env) SampleCommits(table string) {
	e.T.Helper()
	e.MustExec(`CREATE TABLE sampled (synchronous_commit text);
		CREATE FUNCTION sample() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			INSERT INTO sampled SELECT current_setting('synchronous_commit'); RETURN NULL;
		END $$;
		CREATE CONSTRAINT TRIGGER sample AFTER INSERT ON ` + table + ` DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION sample()`)
}

// WantCommit asserts that one commit was sampled, under the given setting.
func (e *Env) WantCommit(setting string) {
	e.T.Helper()
	if n := e.Count("SELECT count(*) FROM sampled WHERE synchronous_commit = $1", setting); n != 1 {
		e.T.Errorf("%d commits were %s, want 1", n, setting)
	}
}
