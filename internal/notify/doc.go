// Package notify sends alerts to mail, chats and pagers, through a library that knows their protocols. Webhooks and Slack need no
// library: they are in package relay.
//
// Every request goes through the transport of alerts, which decides where the relay may connect to. Most services of the
// library send with [net/http.DefaultTransport], so [GuardLibraries] replaces it.
package notify
