// Package notify sends alerts to mail, chats and pagers. Webhooks and Slack's own URLs are in
// package internal/relay/alert.
//
// A channel is one URL, spelled as shoutrrr (https://shoutrrr.nickfedor.com) spells it. services.go
// has all kinds; request.go reads a URL and posts messages; mail.go sends mail.
package notify
