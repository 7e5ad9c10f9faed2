package main

import (
	"time"

	"github.com/outbox-relay/outbox-relay/relay/archive"
)

// retentionFields are the settings of what is kept for how long.
func retentionFields() []field {
	return []field{
		{path: "retention.archive_after", env: "RETENTION_ARCHIVE_AFTER", kind: one("720h", parseKept), standard: archive.DefaultArchiveAfter},
		{path: "retention.delete_after", env: "RETENTION_DELETE_AFTER", kind: one("8760h", parseKept), standard: archive.DefaultDeleteAfter},
		{path: "retention.attempts", env: "RETENTION_ATTEMPTS", kind: one("2160h", parseKept), standard: archive.DefaultKeepAttempts},
		{path: "retention.processed_events", env: "RETENTION_PROCESSED_EVENTS", kind: one("2160h", parseKept), standard: archive.DefaultKeepProcessed},
		{path: "retention.schedule", env: "RETENTION_SCHEDULE", kind: one(`"17 3 * * *"`, parseText), standard: archive.DefaultArchiveSchedule},
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
func (c *config) retention() archive.Retention {
	return archive.Retention{
		ArchiveAfter:    get[time.Duration](c, "retention.archive_after"),
		DeleteAfter:     get[time.Duration](c, "retention.delete_after"),
		Attempts:        get[time.Duration](c, "retention.attempts"),
		ProcessedEvents: get[time.Duration](c, "retention.processed_events"),
		Schedule:        get[string](c, "retention.schedule"),
	}
}
