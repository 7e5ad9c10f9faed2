package main

import (
	"time"

	"github.com/outbox-relay/outbox-relay/relay"
)

// retentionFields are the settings of what is kept for how long.
func retentionFields() []field {
	return []field{
		{path: "retention.archive_after", env: "RETENTION_ARCHIVE_AFTER", kind: one("720h", parseKept), standard: relay.DefaultArchiveAfter},
		{path: "retention.delete_after", env: "RETENTION_DELETE_AFTER", kind: one("8760h", parseKept), standard: relay.DefaultDeleteAfter},
		{path: "retention.attempts", env: "RETENTION_ATTEMPTS", kind: one("2160h", parseKept), standard: relay.DefaultKeepAttempts},
		{path: "retention.processed_events", env: "RETENTION_PROCESSED_EVENTS", kind: one("2160h", parseKept), standard: relay.DefaultKeepProcessed},
		{path: "retention.schedule", env: "RETENTION_SCHEDULE", kind: one(`"17 3 * * *"`, parseText), standard: relay.DefaultArchiveSchedule},
	}
}

// parseKept reads a duration of which 0, with or without a unit, means for ever.
func parseKept(text string) (time.Duration, string) {
	if d, err := time.ParseDuration(text); err == nil && d == 0 {
		return 0, ""
	}
	return parseDuration(text)
}

// retention returns what the relay, and the command that does its work by hand, are told to keep.
func (c *config) retention() relay.Retention {
	return relay.Retention{
		ArchiveAfter:    get[time.Duration](c, "retention.archive_after"),
		DeleteAfter:     get[time.Duration](c, "retention.delete_after"),
		Attempts:        get[time.Duration](c, "retention.attempts"),
		ProcessedEvents: get[time.Duration](c, "retention.processed_events"),
		Schedule:        get[string](c, "retention.schedule"),
	}
}
