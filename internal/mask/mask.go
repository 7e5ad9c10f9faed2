// Package mask hides secrets in texts that others wrote: what a receiver, a proxy or the transport
// said of a request.
package mask

import (
	"encoding/base64"
	"html"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxExcerpt bounds what is kept of a text that others wrote, in bytes.
const MaxExcerpt = 1 << 10

const (
	masked = "[masked]"
	// minSecret is how long a value must be to be masked, in the characters that bare keeps: a
	// shorter one stands in every other word.
	minSecret = 4
	// maskedPrefix is how much of a secret's beginning gives it away. Receivers shorten what they
	// repeat.
	maskedPrefix = 8
	// minPart is how long one word of a longer value must be to be masked without the others.
	minPart = 8
	// maxPiece is how much of a secret is compared at once.
	maxPiece = 256
	// maxLayers is how many encodings may lie on one another, such as a JSON document within an
	// HTML page.
	maxLayers = 4
)

// A Mask hides the secrets of one exchange in texts that a receiver, a proxy or the transport
// wrote. It finds a secret in upper and lower case, wrapped, cut off, and escaped as JSON, HTML and
// URLs do it.
type Mask struct {
	byFirst [256][]string // the secrets, bare, by their first byte
}

// AddHeader adds a header's value, its longer words, and what a Basic credential holds.
func (m *Mask) AddHeader(value string) {
	m.Add(value)
	for _, part := range strings.FieldsFunc(value, func(r rune) bool { return strings.ContainsRune(" ,;=", r) }) {
		if len(part) >= minPart {
			m.Add(part)
		}
	}
	if kind, credential, ok := strings.Cut(value, " "); ok {
		m.Add(credential)
		if strings.EqualFold(kind, "basic") {
			plain, _ := base64.StdEncoding.DecodeString(strings.TrimSpace(credential))
			_, password, _ := strings.Cut(string(plain), ":")
			m.Add(string(plain), password)
		}
	}
}

// AddURL adds the query and the user info of a URL. Its path stays readable: operators know a
// destination by it.
func (m *Mask) AddURL(u *url.URL) {
	m.Add(u.RawQuery)
	for name, values := range u.Query() {
		for _, value := range values {
			if value == "" {
				value = name
			}
			m.Add(value)
		}
	}
	if u.User != nil {
		password, _ := u.User.Password()
		plain := u.User.Username() + ":" + password
		m.Add(plain, password, base64.StdEncoding.EncodeToString([]byte(plain)))
	}
}

// OfURL returns the mask of an alert channel, whose path is its key, and of more secrets.
func OfURL(u *url.URL, more ...string) *Mask {
	m := &Mask{}
	m.AddURL(u)
	m.Add(more...)
	m.Add(u.Path)
	for _, part := range strings.Split(u.Path, "/") {
		if len(part) >= minPart {
			m.Add(part)
		}
	}
	return m
}

// Add adds secrets, each as it is and decoded: one that contains its own escape may come back
// either way.
func (m *Mask) Add(secrets ...string) {
	for _, secret := range secrets {
		layer := newLayer(secret)
		for range maxLayers {
			m.addBare(string(layer.bare().text))
			next, changed := layer.decode()
			if !changed {
				break
			}
			layer = next
		}
	}
}

// addBare adds a secret in pieces that cover it: comparing long ones at every byte of a text would
// take too long.
func (m *Mask) addBare(secret string) {
	for len(secret) >= minSecret {
		piece := secret[:min(len(secret), maxPiece)]
		if !slices.Contains(m.byFirst[piece[0]], piece) {
			m.byFirst[piece[0]] = append(m.byFirst[piece[0]], piece)
		}
		if len(secret) <= maxPiece {
			return
		}
		secret = secret[min(maxPiece, len(secret)-maxPiece):]
	}
}

// Hide replaces every secret in a text. cut says that the text ends too early, so that its end may
// be the beginning of a secret.
func (m *Mask) Hide(text string, cut bool) string {
	hidden := make([]bool, len(text))
	for layer, depth := newLayer(text), 0; ; depth++ {
		m.mark(hidden, layer.bare(), cut)
		next, changed := layer.decode()
		if !changed || depth == maxLayers {
			break
		}
		layer = next
	}
	var b strings.Builder
	for i := range len(text) {
		switch {
		case !hidden[i]:
			b.WriteByte(text[i])
		case i == 0 || !hidden[i-1]:
			b.WriteString(masked)
		}
	}
	return b.String()
}

// mark marks the bytes of the original text in which a layer holds a secret, or enough of its
// beginning.
func (m *Mask) mark(hidden []bool, l layer, cut bool) {
	for i := range l.text {
		longest := 0
		for _, secret := range m.byFirst[l.text[i]] {
			n := commonPrefix(l.text[i:], secret)
			if n >= min(len(secret), maskedPrefix) || cut && i+n == len(l.text) && n >= minSecret-1 {
				longest = max(longest, n)
			}
		}
		if longest > 0 {
			for at := l.from[i]; at < l.to[i+longest-1]; at++ {
				hidden[at] = true
			}
		}
	}
}

func commonPrefix(text []byte, secret string) (n int) {
	for n < len(text) && n < len(secret) && text[n] == secret[n] {
		n++
	}
	return n
}

// A layer is a text after some decoding. Byte i stands for the bytes from[i] to to[i] of the
// original.
type layer struct {
	text     []byte
	from, to []int
}

func newLayer(text string) layer {
	l := layer{text: []byte(text), from: make([]int, len(text)), to: make([]int, len(text))}
	for i := range l.text {
		l.from[i], l.to[i] = i, i+1
	}
	return l
}

func (l *layer) push(b byte, from, to int) {
	l.text, l.from, l.to = append(l.text, b), append(l.from, from), append(l.to, to)
}

// bare returns the layer in lower case, without what encodings add, drop or replace: blanks and
// line ends, quotes and backslashes, the signs in which alphabets of base64 differ, its padding,
// and the plus that stands for a blank.
func (l layer) bare() (b layer) {
	for i, c := range l.text {
		if c > ' ' && c != 0x7f && !strings.ContainsRune(`\"'+-_/=`, rune(c)) {
			if 'A' <= c && c <= 'Z' {
				c += 'a' - 'A'
			}
			b.push(c, l.from[i], l.to[i])
		}
	}
	return b
}

// decode returns the layer with one level of escapes and markup removed, and whether there was any.
func (l layer) decode() (decoded layer, changed bool) {
	for i := 0; i < len(l.text); {
		plain, n := unescape(l.text[i:])
		if n == 0 {
			decoded.push(l.text[i], l.from[i], l.to[i])
			i++
			continue
		}
		for j := range len(plain) {
			decoded.push(plain[j], l.from[i], l.to[i+n-1])
		}
		i += n
		changed = true
	}
	return decoded, changed
}

// Bounds of an escape and of a tag, in bytes.
const (
	maxEntity = 12
	maxTag    = 64
)

// unescape returns what the escape sequence at the beginning of s stands for, and its length; 0:
// there is none.
func unescape(s []byte) (plain string, length int) {
	switch s[0] {
	case '%':
		if c, ok := hexadecimal(s, 1, 2); ok {
			return string([]byte{byte(c)}), 3
		}
	case '\\':
		if len(s) < 2 {
			return "", 0
		}
		switch s[1] {
		case 'u':
			if c, ok := hexadecimal(s, 2, 4); ok {
				return string(rune(c)), 6
			}
		case 'x':
			if c, ok := hexadecimal(s, 2, 2); ok {
				return string([]byte{byte(c)}), 4
			}
		case 'n', 'r', 't':
			return " ", 2
		}
		return string(s[1:2]), 2
	case '&':
		if end := strings.IndexByte(string(s[:min(len(s), maxEntity)]), ';'); end > 0 {
			entity := string(s[:end+1])
			if plain := html.UnescapeString(entity); plain != entity {
				return plain, end + 1
			}
		}
	case '<': // a line is wrapped, a word is coloured
		if end := strings.IndexByte(string(s[:min(len(s), maxTag)]), '>'); end > 0 {
			return " ", end + 1
		}
	}
	return "", 0
}

func hexadecimal(s []byte, at, digits int) (value uint64, ok bool) {
	if len(s) < at+digits {
		return 0, false
	}
	value, err := strconv.ParseUint(string(s[at:at+digits]), 16, 32)
	return value, err == nil && value <= utf8.MaxRune
}
