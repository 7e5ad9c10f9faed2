// Package watch looks around the database every half minute: whether deliveries lag, wait or are parked, what blocks vacuum,
// and how the database bears it (watch.go, store.go). Before each look it searches for events without deliveries
// (undelivered.go). Conditions that people should know of become alerts, and end them (conditions.go); housekeeping stands down
// while Pressure names a reason. One relay looks, the others read what it saw.
package watch
