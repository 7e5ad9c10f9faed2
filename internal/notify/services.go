package notify

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/mask"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
)

// A service is one kind of channel.
type service struct {
	form string         // how its URLs are spelled, without options
	send func(*request) // reads the URL and posts the alert
}

// services are the kinds of channels, by the schemes of their URLs.
var services = map[string]service{
	"bark": {"bark://:KEY@HOST", func(r *request) {
		r.post(r.server(r.Path, "push"), fields{
			"device_key": r.password(), "title": r.title, "body": r.text, "badge": r.number(10, "badge"),
		}.with(r, "sound", "icon", "group", "url", "category", "copy"), "code", 200)
	}},
	"discord": {"discord://TOKEN@ID", func(r *request) {
		r.option("splitlines", "colorerror", "colorwarn", "colorinfo", "colordebug") // an alert has one line, of no level
		r.need(r.Host, r.User.Username())
		address := "https://discord.com/api/webhooks/" + r.Host + "/" + r.User.Username()
		if thread := r.option("thread_id"); thread != "" {
			address += "?thread_id=" + url.QueryEscape(thread)
		}
		r.post(address, fields{
			"embeds":   []fields{{"title": r.title, "description": r.text, "color": r.number(16, "color")}},
			"username": r.option("username"), "avatar_url": r.option("avatar", "avatarurl"),
		})
	}},
	"googlechat": {"googlechat://chat.googleapis.com/v1/spaces/SPACE/messages?key=KEY&token=TOKEN", sendGoogleChat},
	"gotify": {"gotify://HOST/TOKEN", func(r *request) {
		r.option("insecureskipverify") // certificates are always verified
		folder, token := path.Split(strings.TrimSuffix(r.Path, "/"))
		r.need(token)
		address := r.server(folder, "message")
		if r.isSet(false, "useheader") {
			r.header.Set("X-Gotify-Key", token)
		} else {
			address += "?token=" + url.QueryEscape(token)
		}
		r.post(address, fields{
			"title": r.title, "message": r.text, "priority": r.number(10, "priority"), "date": r.option("date"), "extras": r.json("extras"),
		})
	}},
	"hangouts": {"hangouts://chat.googleapis.com/v1/spaces/SPACE/messages?key=KEY&token=TOKEN", sendGoogleChat},
	"ifttt": {"ifttt://KEY/?events=EVENT,EVENT", func(r *request) {
		events, values := r.option("events"), fields{}.with(r, "value1", "value2", "value3")
		text, title := r.choice("messagevalue", "2", "1", "3"), r.choice("titlevalue", "0", "1", "2", "3")
		r.need(r.Host, events)
		if title != "0" {
			values["value"+title] = r.title
		}
		values["value"+text] = r.text
		for _, event := range split(events) {
			r.post("https://maker.ifttt.com/trigger/"+url.PathEscape(event)+"/with/key/"+url.PathEscape(r.Host), values)
		}
	}},
	"join": {"join://shoutrrr:KEY@join/?devices=DEVICE,DEVICE", func(r *request) {
		query := url.Values{"deviceIds": {r.option("devices")}, "apikey": {r.password()}, "title": {r.title}, "text": {r.text}, "icon": {r.option("icon")}}
		r.need(r.password(), query.Get("deviceIds"))
		r.post("https://joinjoaomgcd.appspot.com/_ah/api/messaging/v1/sendPush?"+query.Encode(), "")
	}},
	"lark": {"lark://open.larksuite.com/TOKEN", func(r *request) {
		content := [][]fields{{{"tag": "text", "text": r.text}}}
		if link := r.option("link"); link != "" {
			content = append(content, []fields{{"tag": "a", "text": "More Info", "href": link}})
		}
		message := fields{"msg_type": "post", "content": fields{"post": fields{"en_us": fields{"title": r.title, "content": content}}}}
		if secret := r.option("secret"); secret != "" {
			timestamp := fmt.Sprint(time.Now().Unix())
			signature := hmac.New(sha256.New, []byte(timestamp+"\n"+secret)).Sum(nil)
			message["timestamp"], message["sign"] = timestamp, base64.StdEncoding.EncodeToString(signature)
		}
		r.need(r.Host, r.segment(0))
		r.post("https://"+r.Host+"/open-apis/bot/v2/hook/"+r.segment(0), message, "code", 0)
	}},
	// A password without a user is an access token. Without rooms, the message is for all that were
	// joined.
	"matrix": {"matrix://USER:PASSWORD@HOST/?rooms=ROOM,ROOM", func(r *request) {
		api, token := r.server("_matrix/client/r0/"), any(r.password())
		if name := r.User.Username(); name != "" {
			login := fields{"type": "m.login.password", "identifier": fields{"type": "m.id.user", "user": name}, "password": token}
			token = r.post(api+"login", login)["access_token"]
		}
		r.header.Set("Authorization", fmt.Sprint("Bearer ", token))
		var joined struct {
			Rooms []string `json:"joined_rooms"`
		}
		rooms := split(r.option("rooms", "room"))
		if len(rooms) == 0 {
			_ = json.Unmarshal(r.exchange(http.MethodGet, api+"joined_rooms", nil), &joined) // none: nothing is sent
		}
		for _, room := range rooms {
			if room[0] != '#' && room[0] != '!' {
				room = "#" + room
			}
			joined.Rooms = append(joined.Rooms, fmt.Sprint(r.post(api+"join/"+url.PathEscape(room), fields{})["room_id"]))
		}
		for _, room := range joined.Rooms {
			r.post(api+"rooms/"+url.PathEscape(room)+"/send/m.room.message", fields{"msgtype": "m.text", "body": r.text})
		}
	}},
	"mattermost": {"mattermost://USER@HOST/TOKEN/CHANNEL", func(r *request) {
		r.need(r.segment(0))
		r.post(r.server("hooks", r.segment(0)), r.icon(fields{"text": r.text, "username": r.User.Username(), "channel": r.segment(1)}))
	}},
	"notifiarr": {"notifiarr://KEY?channel=ID", func(r *request) { // or its own URL, after notifiarr+
		_, key, _ := strings.Cut(r.Host+r.Path, "/passthrough/")
		if r.Scheme == "notifiarr" {
			key = cmp.Or(r.option("apikey"), r.Host)
		}
		r.need(key)
		r.post("https://notifiarr.com/api/v1/notification/passthrough/"+url.PathEscape(key), fields{
			"notification": fields{"name": cmp.Or(r.option("name"), "outbox-relay")},
			"discord": fields{
				"color": r.option("color"), "text": fields{"description": r.text}, "images": fields{}.with(r, "thumbnail", "image"),
				"ids": fields{"channel": r.number(10, "channel")},
			},
		})
	}},
	"ntfy": {"ntfy://USER:PASSWORD@HOST/TOPIC", func(r *request) {
		r.option("disabletlsverification") // certificates are always verified
		r.header.Set("Title", r.title)
		for _, name := range []string{"Priority", "Tags", "Actions", "Click", "Attach", "Icon", "Filename", "Email"} {
			r.header.Set(name, r.option(strings.ToLower(name)))
		}
		r.header.Set("Delay", r.option("delay", "at", "in"))
		for _, name := range []string{"Cache", "Firebase"} {
			if !r.isSet(true, strings.ToLower(name)) {
				r.header.Set(name, "no")
			}
		}
		maps.DeleteFunc(r.header, func(_ string, values []string) bool { return values[0] == "" })
		r.setBasicAuth(r.User.Username(), r.password())
		r.need(r.segment(0))
		r.Host = cmp.Or(r.Host, "ntfy.sh")
		r.post(r.server(r.Path), r.text)
	}},
	"opsgenie": {"opsgenie://api.opsgenie.com/KEY", func(r *request) {
		details := fields{}
		for _, pair := range split(r.option("details")) {
			name, value, _ := strings.Cut(pair, ":")
			details[name] = value
		}
		r.need(r.Host, r.segment(0))
		r.header.Set("Authorization", "GenieKey "+r.segment(0))
		r.post("https://"+r.Host+"/v2/alerts", fields{
			"message": plain.Shorten(r.title, maxOpsgenieTitle), "description": strings.TrimSpace(r.text + "\n" + r.option("description")),
			"responders": r.entities("responders"), "visibleTo": r.entities("visibleto"), "details": details,
			"actions": split(r.option("actions")), "tags": split(r.option("tags")),
		}.with(r, "alias", "entity", "source", "priority", "note", "user"))
	}},
	// An alert is one incident, which its recovery closes.
	"pagerduty": {"pagerduty://events.pagerduty.com/KEY", func(r *request) {
		r.option("action", "dedup_key")
		action := "trigger"
		if r.alert.ResolvedAt != nil {
			action = "resolve"
		}
		r.need(r.segment(0))
		r.post("https://"+cmp.Or(r.Host, "events.pagerduty.com")+"/v2/enqueue", fields{
			"routing_key": r.segment(0), "event_action": action, "dedup_key": incidentKey(path.Join("outbox-relay", r.alert.Environment, r.alert.Database, r.alert.Rule, r.alert.Subject)),
			"payload": fields{
				"summary": plain.Shorten(r.text, mask.MaxExcerpt), "source": cmp.Or(r.option("source"), "default"),
				"severity": r.choice("severity", "error", "critical", "warning", "info"), "custom_details": r.json("details"),
			},
			"contexts": r.contexts(),
		}.with(r, "client", "client_url"))
	}},
	"pushbullet": {"pushbullet://TOKEN/DEVICE", func(r *request) {
		r.need(r.Host)
		r.header.Set("Access-Token", r.Host)
		devices := strings.Split(strings.Trim(r.Path, "/"), "/")
		if r.Fragment != "" {
			devices = append(devices, "#"+r.Fragment)
		}
		for _, device := range devices {
			message := fields{"type": "note", "title": r.title, "body": r.text}
			if channel, ok := strings.CutPrefix(device, "#"); ok {
				message["channel_tag"] = channel
			} else if strings.Contains(device, "@") {
				message["email"] = device
			} else {
				message["device_iden"] = device
			}
			r.post("https://api.pushbullet.com/v2/pushes", message, "active", true)
		}
	}},
	"pushover": {"pushover://shoutrrr:TOKEN@USER/?devices=DEVICE,DEVICE", func(r *request) {
		r.need(r.Host, r.password())
		r.post("https://api.pushover.net/1/messages.json", url.Values{
			"user": {r.Host}, "token": {r.password()}, "device": {r.option("devices")}, "title": {r.title}, "message": {r.text},
			"priority": {cmp.Or(r.option("priority"), "0")},
		}, "status", 1)
	}},
	"rocketchat": {"rocketchat://USER@HOST/TOKEN/TOKEN/CHANNEL", func(r *request) {
		r.need(r.segment(1))
		channel := r.segment(2) + r.Fragment
		if channel != "" && channel[0] != '@' {
			channel = "#" + channel
		}
		r.post(r.server("hooks", r.segment(0), r.segment(1)), fields{"text": r.text, "username": r.User.Username(), "channel": channel})
	}},
	"signal": {"signal://HOST:8080/NUMBER/RECIPIENT", func(r *request) {
		number, recipients, _ := strings.Cut(strings.Trim(r.Path, "/"), "/")
		// Only a plus or a group begins another recipient: groups have slashes in their names.
		recipients = strings.NewReplacer("/+", ",+", "/group.", ",group.").Replace(recipients)
		r.need(number, recipients)
		r.Host = net.JoinHostPort(cmp.Or(r.option("host"), r.Hostname()), cmp.Or(r.option("port"), r.Port(), "8080"))
		r.setBasicAuth(cmp.Or(r.option("user"), r.User.Username()), cmp.Or(r.option("password"), r.password()))
		if token := r.option("token", "apikey"); token != "" {
			r.header.Set("Authorization", "Bearer "+token)
		}
		r.post(r.server("v2", "send"), fields{
			"message": r.text, "number": cmp.Or(r.option("source"), number), "recipients": split(cmp.Or(r.option("recipients", "to"), recipients)),
		})
	}},
	"slack": {"slack://hook:A-B-C@webhook or slack://xoxb:A-B-C@CHANNEL", func(r *request) {
		text, channel, name := r.User.String(), r.Host, ""
		if r.segment(0) != "" { // a webhook's token alone
			text, channel, name = "hook:"+r.Host+strings.TrimSuffix(r.Path, "/"), "webhook", r.User.Username()
		}
		token := append(slackToken.FindStringSubmatch(text), "", "", "", "", "")[1:5]
		r.need(token[0])
		message := r.icon(fields{
			"text": r.title, "username": cmp.Or(r.option("botname", "username"), name), "thread_ts": r.option("thread_ts"),
			"attachments": []fields{{"text": r.text, "color": r.option("color")}},
		})
		if token[0] == "hook" {
			r.post("https://hooks.slack.com/services/"+strings.Join(token[1:], "/"), message)
			return
		}
		message["channel"] = channel
		r.header.Set("Authorization", "Bearer "+strings.Join(token, "-"))
		r.post("https://slack.com/api/chat.postMessage", message, "ok", true)
	}},
	"smtp": {"smtp://USER:PASSWORD@HOST:587/?from=ADDRESS&to=ADDRESS,ADDRESS", sendMail},
	"teams": {"teams://GROUP@TENANT/ID/OWNER/ID?host=ORGANISATION.webhook.office.com", func(r *request) { // or its own URL, after teams+
		webhook := r.option("host") + "/webhookb2/" + r.User.Username() + "@" + r.Host + "/IncomingWebhook" + r.Path
		if r.Scheme != "teams" {
			webhook = r.Host + r.Path
		}
		r.need(teamsWebhook.FindString(webhook))
		r.post("https://"+webhook, fields{
			"@type": "MessageCard", "@context": "http://schema.org/extensions", "markdown": true,
			"title": r.title, "summary": r.title, "themeColor": r.option("color"), "sections": []fields{{"text": r.text}},
		})
	}},
	// The text is plain: Telegram refuses Markdown that does not close, such as a name with one
	// underscore.
	"telegram": {"telegram://TOKEN@telegram/?chats=CHAT,CHAT", func(r *request) {
		r.option("parsemode", "preview")
		silent, chats := !r.isSet(true, "notification"), r.option("chats", "channels")
		r.need(r.User.Username(), r.password(), chats)
		for _, chat := range split(chats) {
			id, thread, _ := strings.Cut(chat, ":")
			r.post("https://api.telegram.org/bot"+r.User.Username()+":"+r.password()+"/sendMessage", fields{
				"chat_id": id, "message_thread_id": thread, "text": r.text, "disable_notification": silent,
				"link_preview_options": fields{"is_disabled": true},
			}, "ok", true)
		}
	}},
	"wecom": {"wecom://KEY", func(r *request) {
		key := cmp.Or(r.option("key"), r.Host)
		r.need(key)
		r.post("https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key="+url.QueryEscape(key), fields{"msgtype": "text", "text": fields{
			"content": r.text, "mentioned_list": split(r.option("mentioned_list")), "mentioned_mobile_list": split(r.option("mentioned_mobile_list")),
		}}, "errcode", 0)
	}},
	"zulip": {"zulip://BOT:KEY@HOST/?stream=STREAM&topic=TOPIC", func(r *request) {
		r.need(r.User.Username(), r.password(), r.Host)
		r.setBasicAuth(r.User.Username(), r.password())
		r.post("https://"+r.Host+"/api/v1/messages", url.Values{
			"type": {"stream"}, "to": {r.option("stream")}, "topic": {r.option("topic")}, "content": {r.text},
		})
	}},
}

// maxOpsgenieTitle bounds the message of an alert of Opsgenie, whose description has the text.
const maxOpsgenieTitle = 130

// Patterns of what services write.
var (
	// slackToken is the kind of a webhook's or a bot's token, and its parts.
	slackToken   = regexp.MustCompile(`^(xox.|hook)[-:]([A-Z0-9]{9,})[-/,]([A-Z0-9]{9,})[-/,]([A-Za-z0-9]{24,})$`)
	teamsWebhook = regexp.MustCompile(`^[a-zA-Z0-9-]+\.webhook\.office\.com/webhookb2/[0-9a-f-]{36}@[0-9a-f-]{36}/IncomingWebhook/[0-9a-f]{32}/[0-9a-f-]{36}/[^/]+$`)
	// opsgenieID is the identity of a team, a user, an escalation or a schedule.
	opsgenieID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

func sendGoogleChat(r *request) {
	clear(r.options) // they are Google's
	r.need(r.Host)
	r.post((&url.URL{Scheme: "https", Host: r.Host, Path: r.Path, RawQuery: r.RawQuery}).String(), fields{"text": r.text})
}

// icon adds the icon of Mattermost and Slack, an emoji or a URL.
func (r *request) icon(message fields) fields {
	name, icon := "icon_emoji", r.option("icon", "icon_emoji", "icon_url")
	if strings.Contains(icon, "://") {
		name = "icon_url"
	}
	message[name] = icon
	return message
}

// entities returns people and teams of Opsgenie: team:NAME, user:NAME, or any kind with an ID.
func (r *request) entities(option string) (entities []fields) {
	for _, text := range split(r.option(option)) {
		kind, name, _ := strings.Cut(text, ":")
		key := map[string]string{"team": "name", "user": "username"}[kind]
		if opsgenieID.MatchString(name) {
			key = "id"
		}
		r.need(key)
		entities = append(entities, fields{"type": kind, key: name})
	}
	return entities
}

// contexts returns the links and images of an incident of PagerDuty: JSON, or a list of link:URL
// and image:URL.
func (r *request) contexts() (contexts []fields) {
	text := r.option("contexts")
	if json.Unmarshal([]byte(text), &contexts) == nil {
		return contexts
	}
	for _, item := range split(text) {
		kind, address, _ := strings.Cut(item, ":")
		key := map[string]string{"link": "href", "image": "src"}[kind]
		r.need(key, address)
		contexts = append(contexts, fields{"type": kind, key: address})
	}
	return contexts
}

// incidentKey returns a key that PagerDuty takes and shows: as it is, or a hash of what holds
// anything but names.
func incidentKey(key string) string {
	if len(key) <= 255 && strings.Trim(key, "abcdefghijklmnopqrstuvwxyz0123456789_-/") == "" {
		return key
	}
	return alert.ChannelName("outbox-relay", key)
}
