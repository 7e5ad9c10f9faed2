// Package traces exports spans to a collector, by OTLP over HTTP.
//
// The SDK of OpenTelemetry samples, batches and encodes. What is here sends the batches
// (client.go), bounds and counts them (traces.go). The SDK's own HTTP exporter does the same, and
// would make the binary 2.2 MB larger: it brings gRPC's packages and an encoding in JSON along.
//
// Exporting never slows a delivery: a span that finds the queue full is dropped and counted. A
// collector that does not answer is logged once, and once more when it answers again.
package traces
