package main

import (
	"bytes"
	"fmt"
	"net/url"
	"reflect"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// show returns the configuration in effect as YAML, secrets masked, every value with its origin.
func (c *config) show() ([]byte, error) {
	var b bytes.Buffer
	encoder := yaml.NewEncoder(&b)
	encoder.SetIndent(2)
	if err := encoder.Encode(c.showNode(newShape(allFields()), "", "")); err != nil {
		return nil, fmt.Errorf("write configuration: %w", err)
	}
	return b.Bytes(), nil
}

// showNode returns what stands at path, nil if that is nothing. The order is that of the fields.
func (c *config) showNode(s shape, pattern, path string) *yaml.Node {
	if _, leaf := s.fields[pattern]; leaf {
		if set, ok := c.settings[path]; ok {
			return c.showValue(pattern, set)
		}
		return nil
	}
	if s.isList(pattern) {
		list := &yaml.Node{Kind: yaml.SequenceNode}
		for _, entry := range map[string][]string{"routes": c.routes, "alerts.channels": c.channels}[pattern] {
			list.Content = append(list.Content, c.showNode(s, below(pattern, "[]"), entry))
		}
		if len(list.Content) == 0 {
			return nil
		}
		return list
	}
	section := &yaml.Node{Kind: yaml.MappingNode}
	for _, step := range s.children[pattern] {
		names := []string{step}
		switch below(pattern, step) {
		case "destinations.*":
			names = c.destinations
		case "destinations.*.headers.*":
			names = c.headers(strings.TrimSuffix(strings.TrimPrefix(path, "destinations."), ".headers"))
		}
		for _, name := range names {
			if child := c.showNode(s, below(pattern, step), below(path, name)); child != nil {
				section.Content = append(section.Content, textNode(name), child)
			}
		}
	}
	if len(section.Content) == 0 {
		return nil
	}
	return section
}

func (c *config) showValue(pattern string, s setting) *yaml.Node {
	var n *yaml.Node
	switch value := reflect.ValueOf(s.value); {
	case pattern == "database.listen_url" && get[secret](c, s.path) == "":
		n = textNode("")
	case pattern == "database.listen_url":
		n = textNode(databaseName(c.direct.ConnConfig))
	case pattern == "database.url":
		n = textNode(c.database())
	case pattern == "destinations.*.url":
		n = textNode(withoutQuery(get[string](c, s.path)))
	case pattern == "egress.proxy", pattern == "destinations.*.proxy":
		n = textNode(withoutUser(get[secret](c, s.path)))
	case pattern == "alerts.channels.[].service": // its host may be the key
		n = textNode(serviceKind(string(get[secret](c, s.path))) + "://" + mask)
	case strings.HasPrefix(pattern, "alerts.channels."):
		n = textNode(onlyHost(get[secret](c, s.path)))
	case value.Kind() == reflect.Slice:
		n = &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
		for i := range value.Len() {
			n.Content = append(n.Content, scalarNode(value.Index(i).Interface()))
		}
	default:
		n = scalarNode(s.value)
	}
	n.LineComment = s.origin.String()
	return n
}

func textNode(text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: printable(text)}
}

// scalarNode writes a value as the file would spell it. Numbers and truths need no quotes; what is a text keeps them
// where YAML would read something else.
func scalarNode(value any) *yaml.Node {
	switch v := value.(type) {
	case time.Duration:
		return textNode(shortDuration(v))
	case int, float64, bool:
		return &yaml.Node{Kind: yaml.ScalarNode, Value: fmt.Sprint(v)}
	}
	return textNode(fmt.Sprint(value)) // secrets mask themselves
}

// shortDuration writes 5m0s as 5m.
func shortDuration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// withoutQuery shows where requests go; a token often stands in the query.
func withoutQuery(raw string) string {
	address, _, has := strings.Cut(raw, "?")
	if has {
		address += "?" + mask
	}
	return address
}

// onlyHost shows a URL whose path is its secret.
func onlyHost(raw secret) string {
	u, err := url.Parse(string(raw))
	if err != nil {
		return mask
	}
	return u.Scheme + "://" + u.Host + "/" + mask
}
