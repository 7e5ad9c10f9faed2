// Package watch looks around the database every half minute, and every few seconds while an alert
// is open: whether deliveries lag, wait or are parked, what blocks vacuum, and how the database
// bears it (watch.go, store.go). Before each look it searches for events without deliveries
// (undelivered.go). Conditions that people should know of become alerts, and end them
// (conditions.go); housekeeping stands down while Pressure names a reason. One relay looks, the
// others read what it saw; it also removes ranges of events that have ended. Lag, which status,
// page and metrics show too, is defined in store_lag.go.
package watch
