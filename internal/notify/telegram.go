package notify

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/nicholas-fedor/shoutrrr/pkg/services/chat/telegram"

	"github.com/outbox-relay/outbox-relay/relay/alert"
)

// sendTelegram sends an alert to every chat of a Telegram channel, as plain text: Telegram refuses Markdown that does not
// close, such as a name with one underscore. The library spells and reads the URL; its own client takes a connection that
// failed, and an answer that is not JSON, for a message that was sent.
func sendTelegram(ctx context.Context, transport *alert.Transport, cfg *telegram.Config, alert alert.Alert) error {
	for _, chat := range cfg.Chats {
		id, thread, inThread := strings.Cut(chat, ":")
		message := map[string]any{
			"chat_id": id, "text": alert.Text(), "disable_notification": !cfg.Notification, "link_preview_options": map[string]bool{"is_disabled": true},
		}
		if inThread {
			message["message_thread_id"] = json.Number(thread)
		}
		body, err := json.Marshal(message)
		if err != nil {
			return fmt.Errorf("encode message: %w", err)
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://api.telegram.org/bot"+cfg.Token+"/sendMessage", bytes.NewReader(body))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := transport.RoundTrip(req)
		if err != nil {
			return err
		}
		answer, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("telegram answered %s: %.200s", resp.Status, answer)
		}
	}
	return nil
}
