package post

import (
	"bytes"
	"strings"
)

// usualAnswer recognises the usual answer, by which a receiver accepts an event: 2xx of HTTP/1.1
// whose whole body is there, as Content-Length says, and nothing behind it. It returns its status
// and its size in bytes; 0 for every other answer, which net/http parses from its beginning. What
// it is not certain of is none.
func usualAnswer(b []byte) (status, size int) {
	line, rest, ok := cutLine(b)
	if !ok || len(line) < len("HTTP/1.1 200 ") || string(line[:len("HTTP/1.1 2")]) != "HTTP/1.1 2" || line[len("HTTP/1.1 200")] != ' ' {
		return 0, 0
	}
	tens, ones := line[len("HTTP/1.1 2")], line[len("HTTP/1.1 20")]
	if !isDigit(tens) || !isDigit(ones) {
		return 0, 0
	}
	status = 200 + int(tens-'0')*10 + int(ones-'0')
	length := -1
	for {
		if line, rest, ok = cutLine(rest); !ok {
			return 0, 0
		}
		if len(line) == 0 {
			break
		}
		name, value, ok := bytes.Cut(line, []byte{':'})
		if !ok || !isName(name) {
			return 0, 0
		}
		value = bytes.Trim(value, " ")
		switch {
		case isNamed(name, "content-length"):
			if length >= 0 || len(value) == 0 || len(value) > 4 {
				return 0, 0
			}
			length = 0
			for _, c := range value {
				if !isDigit(c) {
					return 0, 0
				}
				length = length*10 + int(c-'0')
			}
		case isNamed(name, "connection"):
			if !strings.EqualFold(string(value), "keep-alive") {
				return 0, 0
			}
		case isNamed(name, "transfer-encoding"), isNamed(name, "trailer"), isNamed(name, "upgrade"):
			return 0, 0
		}
	}
	if status == 204 && length < 0 {
		length = 0
	}
	if length < 0 || status == 204 && length > 0 || len(rest) != length {
		return 0, 0
	}
	return status, len(b)
}

// cutLine returns a line of printable ASCII that ends as HTTP has it, and what follows.
func cutLine(b []byte) (line, rest []byte, ok bool) {
	end := bytes.IndexByte(b, '\n')
	if end < 1 || b[end-1] != '\r' {
		return nil, nil, false
	}
	line = b[:end-1]
	for _, c := range line {
		if c < ' ' || c > '~' {
			return nil, nil, false
		}
	}
	return line, b[end+1:], true
}

// isName reports whether a header's name is one of letters, digits and hyphens.
func isName(name []byte) bool {
	for _, c := range name {
		if !isDigit(c) && (c|0x20 < 'a' || c|0x20 > 'z') && c != '-' {
			return false
		}
	}
	return len(name) > 0
}

// isNamed reports whether a header that isName has accepted has this name, which is in lower case.
func isNamed(name []byte, lower string) bool {
	if len(name) != len(lower) {
		return false
	}
	for i, c := range name {
		if c|0x20 != lower[i] {
			return false
		}
	}
	return true
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }
