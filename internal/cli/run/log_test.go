package run

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What net/http tells of an answer without a request is one more line of the log, without what the
// receiver sent.
func TestUnsolicitedAnswersAreLogged(t *testing.T) { // not in parallel: the standard logger is one
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	defer listener.Close()
	served := make(chan struct{})
	go func() {
		defer close(served)
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = conn.Read(make([]byte, 4096))
		_, _ = fmt.Fprint(conn, "HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\nX-Secret: hunter2\r\n\r\n")
	}()

	lines := make(chan []byte, 10)
	reader, writer := io.Pipe()
	defer reader.Close()
	flags, out := log.Flags(), log.Writer()
	defer func() {
		log.SetFlags(flags)
		log.SetOutput(out)
	}()
	log.SetFlags(0)
	log.SetOutput(foreignLog{zerolog.New(writer)})
	go func() {
		defer close(lines)
		buffer := make([]byte, 4096)
		if n, err := reader.Read(buffer); err == nil {
			lines <- buffer[:n]
		}
	}()

	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+listener.Addr().String(), strings.NewReader("{}"))
	testkit.Must(t, err)
	resp, err := transport.RoundTrip(req)
	testkit.Must(t, err)
	_ = resp.Body.Close()
	line := <-lines
	<-served
	var entry struct{ Level, From, Message string }
	if err := json.Unmarshal(bytes.ReplaceAll(line, []byte(`"msg":`), []byte(`"message":`)), &entry); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	if entry.Level != "warn" || entry.From != "library" || entry.Message != "Unsolicited response received on idle HTTP channel" {
		t.Errorf("%s", line)
	}
}
