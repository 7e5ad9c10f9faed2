package notify

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/mask"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// A request carries one alert to one service. The service's function reads the parts of the URL and
// posts messages; nothing is posted after a problem or an error. Without a transport, nothing is
// posted at all: that is how a URL is checked.
type request struct {
	*url.URL
	form        string
	title, text string
	alert       alert.Alert
	header      http.Header       // of every message
	options     map[string]string // of the URL's query, by their names in lower case; reading one removes it
	problem     string            // with the URL
	err         error             // of the first message that failed

	ctx       context.Context
	transport *alert.Transport
}

// send sends an alert to the service of a URL. A problem says what is wrong with the URL.
func send(ctx context.Context, raw string, a alert.Alert, transport *alert.Transport) (problem string, err error) {
	u, err := url.Parse(strings.ReplaceAll(raw, ";", "%3b")) // which separates actions of ntfy, and no options
	kind := Kind(raw)
	service, offered := services[kind]
	switch {
	case err != nil || u.Scheme == "":
		return `is not a URL; write one such as "smtp://user:password@mail.internal:587/?from=relay@example.com&to=ops@example.com"`, nil
	case kind == "http" || kind == "https" || kind == "generic":
		return `is a plain URL; write it as {webhook: "https://…"}`, nil
	case !offered:
		if near := settings.Nearest(kind, Services()); near != "" {
			return fmt.Sprintf("begins with a service that is not offered; did you mean %s://?", near), nil
		}
		return "begins with a service that is not offered; there are " + strings.Join(Services(), ", "), nil
	}
	r := &request{
		URL: u, form: service.form, title: a.Title(), text: a.Text(), alert: a, header: http.Header{}, options: map[string]string{},
		ctx: ctx, transport: transport,
	}
	for name, values := range u.Query() {
		r.options[strings.ToLower(name)] = values[0]
	}
	delete(r.options, "title") // that of the alert is sent
	service.send(r)
	if custom := kind == "teams" || kind == "notifiarr"; len(r.options) > 0 || u.Scheme != kind && !custom {
		r.need("")
	}
	return r.problem, r.err
}

// need refuses the URL unless all of its parts are there.
func (r *request) need(parts ...string) {
	if slices.Contains(parts, "") {
		r.problem = cmp.Or(r.problem, fmt.Sprintf("is not how %s spells its URLs; write %s, with the options that it has", Kind(r.Scheme), r.form))
	}
}

func (r *request) password() string {
	password, _ := r.User.Password()
	return password
}

// segment returns a part of the path; without it, nothing.
func (r *request) segment(i int) string {
	segments := strings.Split(strings.Trim(r.Path, "/"), "/")
	if i >= len(segments) {
		return ""
	}
	return segments[i]
}

// option returns the first of some options that is set.
func (r *request) option(names ...string) (value string) {
	for _, name := range names {
		value = cmp.Or(value, r.options[name])
		delete(r.options, name)
	}
	return value
}

// split returns the items of a list that commas separate.
func split(text string) (items []string) {
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			items = append(items, item)
		}
	}
	return items
}

// choice returns an option that is one of some words, in lower case; the first is the default.
func (r *request) choice(name string, words ...string) string {
	value := cmp.Or(strings.ToLower(r.option(name)), words[0])
	if !slices.Contains(words, value) {
		r.need("")
	}
	return value
}

// isSet reports whether a switch is on.
func (r *request) isSet(otherwise bool, names ...string) bool {
	switch strings.ToLower(r.option(names...)) {
	case "":
		return otherwise
	case "yes", "true", "1", "y":
		return true
	case "no", "false", "0", "n":
		return false
	}
	r.need("")
	return false
}

// number returns an option that is a whole number; nil: there is none.
func (r *request) number(base int, name string) any {
	text := r.option(name)
	if text == "" {
		return nil
	}
	n, err := strconv.ParseInt(strings.TrimPrefix(strings.TrimPrefix(text, "#"), "0x"), base, 64)
	if err != nil {
		r.need("")
	}
	return n
}

// json returns an option that is JSON.
func (r *request) json(name string) json.RawMessage {
	text := json.RawMessage(cmp.Or(r.option(name), "null"))
	if !json.Valid(text) {
		r.need("")
	}
	return text
}

// fields are an object in JSON, without those that are empty.
type fields map[string]any

// with adds options to the fields, under the same names.
func (f fields) with(r *request, names ...string) fields {
	for _, name := range names {
		f[name] = r.option(name)
	}
	return f
}

// MarshalJSON implements [json.Marshaler].
func (f fields) MarshalJSON() ([]byte, error) {
	full := map[string]json.RawMessage{}
	for name, value := range f {
		text, err := json.Marshal(value)
		if err != nil {
			return nil, err
		}
		if !slices.Contains([]string{`""`, "null", "{}"}, string(text)) {
			full[name] = text
		}
	}
	return json.Marshal(full)
}

// server returns the address of a path on a server of the operator's, which may speak plain HTTP.
func (r *request) server(path ...string) string {
	scheme := r.choice("scheme", "https", "http")
	if r.isSet(false, "disabletls") {
		scheme = "http"
	}
	return (&url.URL{Scheme: scheme, Host: r.Host}).JoinPath(path...).String()
}

// setBasicAuth adds a name and a password to every message, unless both are empty.
func (r *request) setBasicAuth(name, password string) {
	if name+password != "" {
		(&http.Request{Header: r.header}).SetBasicAuth(name, password)
	}
}

// post sends a form ([url.Values]), a text (string) or JSON (fields), and returns the fields of the
// answer. Some services refuse a message with status 200: confirm is a field of their answer, and
// the value by which they accept.
func (r *request) post(address string, body any, confirm ...any) (answered fields) {
	kind, content := "application/json", ""
	switch body := body.(type) {
	case url.Values:
		kind, content = "application/x-www-form-urlencoded", body.Encode()
	case string:
		kind, content = "text/plain; charset=utf-8", body
	case fields:
		encoded, _ := json.Marshal(body) // of texts, numbers, and JSON that was checked
		content = string(encoded)
	}
	r.header.Set("Content-Type", kind)
	answer := r.exchange(http.MethodPost, address, strings.NewReader(content))
	_ = json.Unmarshal(answer, &answered) // what is not JSON confirms nothing
	if answer != nil && len(confirm) == 2 && fmt.Sprint(answered[confirm[0].(string)]) != fmt.Sprint(confirm[1]) {
		excerpt := plain.Shorten(r.mask().Hide(string(answer), true), mask.MaxExcerpt)
		r.err = fmt.Errorf("send alert: the channel refused it: %s", plain.Line(excerpt))
	}
	return answered
}

// exchange sends one message and returns the answer; nil: there is none.
func (r *request) exchange(method, address string, body io.Reader) (answer []byte) {
	message, err := http.NewRequestWithContext(r.ctx, method, address, body)
	if err != nil {
		r.need("")
	}
	if r.problem != "" {
		r.err = cmp.Or(r.err, errors.New("send alert: the channel's url "+r.problem))
	}
	if r.err == nil && r.transport != nil {
		message.Header = r.header.Clone()
		answer, r.err = r.transport.Exchange(message, r.mask())
	}
	return answer
}

// mask returns the mask of the whole URL: in most services' URLs some part is the key.
func (r *request) mask() *mask.Mask {
	secrets := append(strings.Split(r.Path, "/"), r.Host, r.Hostname(), r.User.Username())
	for _, values := range r.Query() {
		secrets = append(secrets, split(values[0])...)
	}
	return mask.OfURL(r.URL, secrets...)
}
