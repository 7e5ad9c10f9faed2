package post

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"testing"

	"pgregory.net/rapid"
)

// The answers of common servers are recognised, and nothing that net/http would read in another
// way.
func TestUsualAnswer(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]int{
		"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n":                                                                   200,
		"HTTP/1.1 202 Accepted\r\nDate: Mon, 23 Nov 2026 06:00:00 GMT\r\ncontent-length:  2 \r\n\r\nok":                  202,
		"HTTP/1.1 204 No Content\r\nServer: nginx\r\nConnection: keep-alive\r\n\r\n":                                     204,
		"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok": 0,
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no":                                                                  0,
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n":                                              0,
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok":                                            0,
		"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok":                                                                0,
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok":                                   0,
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding : chunked\r\n\r\nok":                                  0,
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n Transfer-Encoding: chunked\r\n\r\nok":                                  0,
		"HTTP/1.1 200 OK\r\n\r\n":                                0,
		"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n":           0,
		"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n":              0,
		"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n":           0,
		"HTTP/1.1 200 OK\nContent-Length: 0\n\n":                 0,
		"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nok": 0,
		"": 0,
	} {
		if status := wantAsNetHTTP(t, []byte(answer)); status != want {
			t.Errorf("%q: %d, want %d", answer, status, want)
		}
	}
}

// Whatever a receiver answers, the relay reads the usual answer as net/http does.
func TestSecurityUsualAnswerReadsAsNetHTTP(t *testing.T) {
	t.Parallel()
	part := rapid.SampledFrom([]string{
		"HTTP/1.1 200 OK", "HTTP/1.1 204 No Content", "HTTP/1.1 299  ", "HTTP/1.1 2", "HTTP/1.1 20x ", "HTTP/1.1 100 Continue", "\r\n", "\r\n", "\r\n\r\n", "\n", "\r", " ", "\t",
		"Content-Length: 0", "Content-Length: 2", "content-length:2", "Content-Length : 2", "Transfer-Encoding: chunked", "Connection: close", "Connection: keep-alive",
		"Trailer: X", "Upgrade: h2c", "X: y", "X-\x00: y", ":", "ok", "0", "2\r\nok\r\n0\r\n\r\n",
	})
	rapid.Check(t, func(t *rapid.T) {
		var answer []byte
		if rapid.Bool().Draw(t, "begins well") {
			answer = append(answer, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"...)
		}
		for range rapid.IntRange(0, 8).Draw(t, "parts") {
			answer = append(answer, part.Draw(t, "part")...)
		}
		wantAsNetHTTP(t, answer)
	})
}

// FuzzUsualAnswer does the same with any bytes.
func FuzzUsualAnswer(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok"))
	f.Add([]byte("HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n"))
	f.Fuzz(func(t *testing.T, answer []byte) { wantAsNetHTTP(t, answer) })
}

func wantAsNetHTTP(t interface{ Fatalf(string, ...any) }, answer []byte) (status int) {
	status, size := usualAnswer(answer)
	if status == 0 {
		return 0
	}
	in := bufio.NewReader(bytes.NewReader(answer))
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatalf("net/http refuses %q: %v", answer, err)
		return 0
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != status || resp.Close || in.Buffered() > 0 || size != len(answer) || !bytes.HasSuffix(answer, body) {
		t.Fatalf("%q: read as %d with %d bytes; net/http: %d, %v, close %t, %d bytes behind it", answer, status, size, resp.StatusCode, err, resp.Close, in.Buffered())
	}
	return status
}
