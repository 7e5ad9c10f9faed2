package pg

import (
	"maps"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// passed are the settings that every pooler keeps for each of its clients.
var passed = map[string]bool{
	"application_name": true, "client_encoding": true,
	"options": true, // cannot be set later: who refuses it says so
}

// SessionSettings returns a copy of the settings that [SetDirect] sets.
func SessionSettings() map[string]string { return maps.Clone(sessionSettings) }

// SetDirect gives a pool the settings that the engine's statements rest on, for as long as its
// connections last.
func SetDirect(cfg *pgxpool.Config, schema string) {
	for name := range cfg.ConnConfig.RuntimeParams { // the server knows TimeZone as timezone
		if _, set := sessionSettings[strings.ToLower(name)]; set {
			delete(cfg.ConnConfig.RuntimeParams, name)
		}
	}
	maps.Copy(cfg.ConnConfig.RuntimeParams, sessionSettings)
	if schema != "" {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	}
}

// SetPooled takes from a pool all that does not outlive a transaction, and returns the settings
// that each transaction needs instead.
func SetPooled(cfg *pgxpool.Config, schema string) (settings map[string]string) {
	SetDirect(cfg, schema)
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // nothing is prepared
	settings = map[string]string{}
	for name, value := range cfg.ConnConfig.RuntimeParams {
		if passed[strings.ToLower(name)] {
			continue
		}
		delete(cfg.ConnConfig.RuntimeParams, name)
		// Of the connection between pooler and server, which is the pooler's to watch; and of BEGIN
		// itself.
		if !strings.HasPrefix(name, "tcp_") && name != "default_transaction_isolation" {
			settings[name] = value
		}
	}
	return settings
}
