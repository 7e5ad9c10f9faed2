package page

import (
	"bytes"
	"encoding/json"
	"html/template"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

const (
	// maxTree is up to how many bytes of JSON are shown as a tree that folds, and maxDepth how
	// deep.
	maxTree  = 256 << 10
	maxDepth = 40
	// unfolded is up to how many members an object or an array is shown open.
	unfolded = 30
)

// jsonTree writes JSON with a line for each member, objects and arrays as details that fold.
// Numbers keep their digits. It is empty for what is no JSON, too large or too deep: then the text
// itself is shown.
func jsonTree(text string) template.HTML {
	if len(text) > maxTree {
		return ""
	}
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	var to bytes.Buffer
	if !writeValue(&to, decoder, "", 0) {
		return ""
	}
	return template.HTML(to.String()) //nolint:gosec // G203: writeValue escapes what it copies
}

// writeValue writes the next value behind its label, which is HTML. It reports whether there was
// one.
func writeValue(to *bytes.Buffer, from *json.Decoder, label string, depth int) bool {
	token, err := from.Token()
	if err != nil || depth > maxDepth {
		return false
	}
	open, composed := token.(json.Delim)
	if !composed {
		var body bytes.Buffer
		encoder := json.NewEncoder(&body)
		encoder.SetEscapeHTML(false)
		if encoder.Encode(token) != nil {
			return false
		}
		to.WriteString(`<div>` + label + `<span class="` + map[bool]string{true: "s", false: "n"}[body.Bytes()[0] == '"'] + `">`)
		template.HTMLEscape(to, []byte(strings.TrimSuffix(body.String(), "\n")))
		to.WriteString(`</span></div>`)
		return true
	}
	var inner bytes.Buffer
	n := 0
	for ; from.More(); n++ {
		label := ""
		if open == '{' {
			name, err := from.Token()
			key, isName := name.(string)
			if err != nil || !isName {
				return false
			}
			label = `<b>` + template.HTMLEscapeString(key) + `</b> `
		}
		if !writeValue(&inner, from, label, depth+1) {
			return false
		}
	}
	if _, err := from.Token(); err != nil {
		return false
	}
	many := plain.Plural(n, "member", "members")
	if open == '[' {
		many = plain.Plural(n, "item", "items")
	}
	if n == 0 {
		to.WriteString(`<div>` + label + map[json.Delim]string{'{': "{}", '[': "[]"}[open] + `</div>`)
		return true
	}
	to.WriteString(`<details` + map[bool]string{true: " open"}[n <= unfolded] + `><summary>` + label + `<i>` + many + `</i></summary>`)
	_, _ = inner.WriteTo(to)
	to.WriteString(`</details>`)
	return true
}
