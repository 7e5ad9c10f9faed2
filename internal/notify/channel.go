package notify

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/nicholas-fedor/shoutrrr/pkg/router"
	"github.com/nicholas-fedor/shoutrrr/pkg/services/chat/telegram"
	"github.com/nicholas-fedor/shoutrrr/pkg/services/email/smtp"
	"github.com/nicholas-fedor/shoutrrr/pkg/types"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// servicesPage says how the URLs of the services are spelled.
const servicesPage = "https://shoutrrr.nickfedor.com"

// services are the services of the library that are offered: those whose every request is known to go through the
// transport of alerts. Its generic and logger are a webhook and no channel.
var services = []string{
	"bark", "discord", "googlechat", "gotify", "hangouts", "ifttt", "join", "lark", "matrix", "mattermost", "notifiarr", "ntfy", "opsgenie",
	"pagerduty", "pushbullet", "pushover", "rocketchat", "signal", "slack", "smtp", "teams", "telegram", "wecom", "zulip",
}

// Services returns the kinds of services that are offered.
func Services() []string { return slices.Clone(services) }

// A serviceChannel sends alerts to one service. The library takes no context, so a message that hangs is left behind; the next
// one is refused until it has ended.
type serviceChannel struct {
	name, kind string
	url        settings.Secret
	transport  *alert.Transport
	sending    chan struct{} // holds a token while a message is under way
}

// New returns the channel of a service's URL, which [ParseURL] has accepted.
func New(raw settings.Secret, transport *alert.Transport) alert.Channel {
	return &serviceChannel{
		name: alert.ChannelName(Kind(string(raw)), string(raw)), kind: Kind(string(raw)), url: raw,
		transport: transport, sending: make(chan struct{}, 1),
	}
}

// A libraryTransport replaces [http.DefaultTransport], with which most of the library's services send. That one obeys HTTP_PROXY
// and dials every address, and clients follow redirects over it. The relay's own requests use neither of the two.
type libraryTransport struct {
	alerts atomic.Pointer[alert.Transport] // of the configuration that is in effect
}

// GuardLibraries makes the transport of alerts carry every request that a library sends with net/http's defaults. A program
// calls it once, before its first channel sends.
func GuardLibraries() {
	guard := &libraryTransport{}
	guard.alerts.Store(alert.NewTransport(post.Egress{}))
	http.DefaultTransport = guard //nolint:forbidigo // no code of this process may send with the other one
}

// RoundTrip implements [http.RoundTripper].
func (l *libraryTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	return l.alerts.Load().RoundTrip(req)
}

// Kind returns the service that a URL names: "teams" of teams+https://….
func Kind(raw string) string {
	scheme, _, _ := strings.Cut(raw, "://")
	kind, _, _ := strings.Cut(strings.ToLower(scheme), "+")
	return kind
}

func (c *serviceChannel) Name() string { return c.name }

// Notify implements [alert.Channel]. It returns when the service has accepted or refused the message, or when ctx ends.
func (c *serviceChannel) Notify(ctx context.Context, alert alert.Alert) error {
	select {
	case c.sending <- struct{}{}:
	default:
		return errors.New("send alert: the message before is still under way")
	}
	done := make(chan error, 1)
	go func() {
		defer func() {
			if r := recover(); r != nil {
				done <- errors.New("the service's client panicked, as one does after a connection that failed")
			}
			<-c.sending
		}()
		done <- c.send(ctx, alert)
	}()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("send alert: %.2000s", withoutSecrets(err, string(c.url))) // some repeat the whole answer
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("send alert: no answer: %w", ctx.Err())
	}
}

func (c *serviceChannel) send(ctx context.Context, alert alert.Alert) error {
	guard, ok := http.DefaultTransport.(*libraryTransport) //nolint:forbidigo // only to see that it is the guarded one
	if !ok {
		return errors.New("http.DefaultTransport is not the guarded one")
	}
	guard.alerts.Store(c.transport) // before Locate, which may log in
	service, err := new(router.ServiceRouter).Locate(string(c.url))
	if err != nil {
		return err
	}
	switch s := service.(type) {
	case *smtp.Service:
		return sendMail(ctx, c.transport, s.Config, alert)
	case *telegram.Service:
		return sendTelegram(ctx, c.transport, s.GetConfig(), alert)
	case interface{ SetHTTPClient(*http.Client) }:
		s.SetHTTPClient(&http.Client{Transport: c.transport})
	case interface{ GetHTTPClient() *http.Client }: // with a transport of its own making
		s.GetHTTPClient().Transport = c.transport
	}
	return service.Send(alert.Text(), c.params(alert))
}

// titleless are the services that refuse a title.
var titleless = []string{"googlechat", "hangouts", "notifiarr", "pagerduty", "rocketchat", "signal", "wecom"}

func (c *serviceChannel) params(alert alert.Alert) *types.Params {
	params := types.Params{}
	if !slices.Contains(titleless, c.kind) {
		params.SetTitle(alert.Title())
	}
	if c.kind == "pagerduty" { // one incident per alert, which its recovery closes
		params["dedup_key"] = incidentKey("outbox-relay/" + alert.Rule + "/" + alert.Subject)
		params["action"] = "trigger"
		if alert.ResolvedAt != nil {
			params["action"] = "resolve"
		}
	}
	return &params
}

// incidentKey returns a key that PagerDuty takes and shows: as it is, or a hash of what holds anything but names.
func incidentKey(key string) string {
	if len(key) <= 255 && strings.Trim(key, "abcdefghijklmnopqrstuvwxyz0123456789_-/") == "" {
		return key
	}
	return alert.ChannelName("outbox-relay", key)
}

// withoutSecrets says what went wrong without any part of the channel's URL: in most of them some part is the key.
func withoutSecrets(err error, raw string) string {
	var request *url.Error
	var mail *textproto.Error
	var network net.Error
	switch {
	case errors.As(err, &mail):
		return "the mail server refused it: " + plain.Line(redact(mail.Error(), raw))
	case errors.As(err, &request): // its own text holds the URL
		return plain.Line(redact(request.Err.Error(), raw))
	case errors.As(err, &network) && network.Timeout():
		return "timed out"
	}
	return plain.Line(redact(err.Error(), raw))
}

// redact masks the parts of a URL, encoded or not, in a text.
func redact(text, raw string) string {
	parts := []string{raw}
	if u, err := url.Parse(raw); err == nil {
		password, _ := u.User.Password()
		parts = append(parts, u.String(), u.User.String(), u.User.Username(), password, u.Host, u.Hostname(), u.Path, strings.Trim(u.Path, "/"), u.RawQuery)
		parts = append(parts, strings.Split(u.Path, "/")...)
		for _, values := range u.Query() {
			parts = append(parts, values...)
		}
	}
	for _, part := range slices.Clone(parts) {
		parts = append(parts, strings.FieldsFunc(part, func(r rune) bool { return strings.ContainsRune(":/@,&=+", r) })...)
		parts = append(parts, url.PathEscape(part), url.QueryEscape(part))
	}
	slices.SortFunc(parts, func(a, b string) int { return len(b) - len(a) })
	for _, part := range slices.Compact(parts) {
		if len(part) >= 4 && part != Kind(raw) {
			text = strings.ReplaceAll(text, part, settings.Mask)
		}
	}
	return text
}

// ParseURL returns a service's URL, or what is wrong with it. It repeats neither the URL nor what the library says about it.
func ParseURL(text string) (settings.Secret, string) {
	if _, problem := settings.ParseText(text); problem != "" {
		return "", problem
	}
	_, err := url.Parse(text)
	kind := Kind(text)
	switch {
	case err != nil || !strings.Contains(text, "://"):
		return "", `is not a URL; write one such as "smtp://user:password@mail.internal:587/?from=relay@example.com&to=ops@example.com"`
	case kind == "http" || kind == "https" || kind == "generic":
		return "", `is a plain URL; write it as {webhook: "https://…"}`
	case !slices.Contains(services, kind):
		if near := settings.Nearest(kind, services); near != "" {
			return "", fmt.Sprintf("begins with a service that is not offered; did you mean %s://?", near)
		}
		return "", "begins with a service that is not offered; there are " + strings.Join(services, ", ")
	case kind == "matrix": // would log in
		return settings.Secret(text), ""
	}
	service, err := new(router.ServiceRouter).Locate(text)
	if err != nil {
		return "", fmt.Sprintf("is not how %s spells its URLs; see %s", kind, servicesPage)
	}
	if mail, ok := service.(*smtp.Service); ok {
		if problem := mailProblem(mail.Config); problem != "" {
			return "", problem
		}
	}
	return settings.Secret(text), ""
}
