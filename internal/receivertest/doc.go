// Package receivertest gives tests of package consumer and of its rooms receivers with a database
// each: a real server, a real client, and what handlers do that a receiver must survive.
package receivertest
