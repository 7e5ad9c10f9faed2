package config

// FileFlag names the configuration file, for every command that reads one.
type FileFlag struct {
	Config string `short:"c" placeholder:"FILE" help:"Configuration file. Default: $OUTBOX_CONFIG, or outbox-relay.yaml if it exists."`
}

// DatabaseFlags are those of commands that need nothing but the database.
type DatabaseFlags struct {
	FileFlag
	Database string `placeholder:"NAME" help:"Entry of databases in the configuration file. Needed if it has several."`
	Schema   string `placeholder:"NAME" help:"Schema that holds the tables. Default: the first of the search_path."`
}

// SettingFlags are the settings that are worth changing for one start. Secrets have none: others
// can read them in the list of processes.
type SettingFlags struct {
	DatabaseFlags
	Name           string `placeholder:"NAME" help:"Name under which operators see this relay. Default: the host's."`
	DestinationURL string `placeholder:"URL" help:"Destination of every event type."`
	PollInterval   string `placeholder:"5s" help:"How long an idle relay waits before it looks by itself."`
	Lease          string `placeholder:"60s" help:"How long a claim holds at most."`
	DrainTimeout   string `placeholder:"20s" help:"How long a stop waits for requests in flight."`
	MaxInFlight    string `placeholder:"256" help:"Concurrent requests over all destinations."`
	Timeout        string `placeholder:"10s" help:"Timeout of one request."`
	LogLevel       string `placeholder:"info" help:"debug, info, warn or error."`
	LogFormat      string `placeholder:"auto" help:"auto, json or console."`
}
