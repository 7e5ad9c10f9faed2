package post

import (
	"bytes"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// What a delivery allocates is what the garbage collector costs the relay, and unlike times it is
// the same on any machine. Not parallel, because allocations of other tests would count.
func TestAllocationsOfADelivery(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector empties pools at random")
	}
	secret, err := webhook.ParseSecret("whsec_b3V0Ym94LXJlbGF5IGJlbmNobWFyayBzZWNyZXQ=")
	testkit.Must(t, err)
	destination := Destination{Name: "default", URL: frugalReceiver(t), SigningSecrets: []webhook.Secret{secret}}.WithDefaults(Egress{})
	to, err := NewEndpoint(destination, "test")
	testkit.Must(t, err)
	defer to.CloseIdleConnections()
	kind, version, key := "invoice.created", 1, "invoice-4711"
	message := Message{EventID: 1, Destination: "default", Fence: 1, Attempt: 1, NotAfter: time.Unix(2e9, 0), Event: Event{
		EventType: &kind, Version: &version, Key: &key, Payload: bytes.Repeat([]byte("x"), 300),
		CreatedAt: pgtype.Timestamptz{Time: time.Unix(1e9, 0), Valid: true},
	}}
	const most = 6
	n := testing.AllocsPerRun(500, func() {
		if result := to.Deliver(t.Context(), message, nil); result.StatusCode != 200 {
			t.Fatalf("the message was not delivered: %+v", result)
		}
	})
	if n > most {
		t.Errorf("a delivery allocates %.0f times, want at most %d", n, most)
	}
}

// frugalReceiver answers 200 to every request with a body of 300 bytes, without an allocation.
func frugalReceiver(t *testing.T) (url string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	done := make(chan struct{})
	t.Cleanup(func() {
		listener.Close()
		<-done
	})
	go func() {
		defer close(done)
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		end, answer, buffer := []byte("\r\n\r\n"), []byte("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), make([]byte, 8<<10)
		for have := 0; ; {
			n, err := conn.Read(buffer[have:])
			if err != nil {
				return
			}
			have += n
			if head := bytes.Index(buffer[:have], end); head >= 0 && have >= head+len(end)+300 {
				have = 0
				if _, err := conn.Write(answer); err != nil {
					return
				}
			}
		}
	}()
	return fmt.Sprintf("http://%s/", listener.Addr())
}
