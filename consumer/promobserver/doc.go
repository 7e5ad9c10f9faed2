// Package promobserver counts and measures for Prometheus what becomes of the events that a
// receiver gets. It is its own module, so that no other user inherits the client library:
//
//	metrics, err := promobserver.New(prometheus.DefaultRegisterer, promobserver.Options{Sources: []string{"finance"}})
//	if err != nil {
//		return err
//	}
//	receive, err := consumer.New(pool, consumer.Config{Receiver: "logistics", Secrets: secrets, Source: "finance", Observe: metrics.Observe}, handle)
//	mux.Handle("POST /webhooks/finance", receive)
//	mux.Handle("GET /metrics", promhttp.Handler())
//
// One Observer serves any number of middlewares and inboxes; the label source distinguishes them.
// Calling [New] again with the same registerer and options returns it, so that packages which do
// not know each other may share it.
//
// # Metrics
//
//	metric                           labels               counts or measures
//	inbox_requests_total             source, result       requests by outcome: the values of consumer.Result
//	inbox_events_total               source, mode,        handlers that ended: result is processed, ignored, failed or
//	                                 result, event_type   commit_failed; mode is request, or inbox for its workers
//	inbox_failed_total               source, mode         failures after which neither sender nor worker tries again
//	inbox_commit_failures_total      source, mode         handlers that succeeded, and whose work was not committed
//	inbox_request_duration_seconds   source, result       a request, from its headers to its answer
//	inbox_handler_duration_seconds   source, mode         the handler's part of it, or of a worker's attempt
//	inbox_breaker_state              breaker, state       1 for the state that it is in; see [Breaker]
//
// No label holds a key, an id or a text of a request: how many series there are depends on the
// configuration alone. event_type is empty unless [Options].EventTypes names types; the types that
// it does not name are then "other".
//
// What waits in an inbox is not among them: a number that must be asked of the database belongs
// into a job that asks it twice a minute, and not into each scrape of each replica.
// docs/receiving.md has the statement.
//
// # Alerts worth having
//
// Events that a person must see: in an inbox they have failed for good, behind a middleware the
// relay knows so and alerts as well.
//
//	sum by (source) (increase(inbox_failed_total[15m])) > 0
//
// The receiver cannot do its work: its database is away, what it depends on is down, or commits
// fail. Relays hold back and repeat, so nothing is lost, but everything waits.
//
//	sum by (source) (rate(inbox_requests_total{result=~"unavailable|breaker_open|commit_failed"}[5m]))
//	  > 0.05 * sum by (source) (rate(inbox_requests_total[5m]))
//
// Requests that do not prove themselves, from a sender that used to: a secret was rotated on one
// side only, or a clock is wrong. Attempts of others show here, too, but have no other requests
// beside them.
//
//	sum by (source) (increase(inbox_requests_total{result="rejected"}[15m])) > 10
//	  and sum by (source) (increase(inbox_requests_total{result!="rejected"}[1d])) > 0
//
// Results key_reused and forgotten are worth an inspection when they appear: a sender uses one key
// for two events, or sends one again after so long that the receiver may have forgotten it.
package promobserver
