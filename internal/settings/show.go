package settings

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// Show returns the configuration in effect as YAML, secrets masked, every value with its origin.
func (s *Set) Show() ([]byte, error) {
	var b bytes.Buffer
	encoder := yaml.NewEncoder(&b)
	encoder.SetIndent(2)
	if err := encoder.Encode(s.showNode("", "")); err != nil {
		return nil, fmt.Errorf("write configuration: %w", err)
	}
	return b.Bytes(), nil
}

// showNode returns what stands at path; nil: nothing. The order is that of the table.
func (s *Set) showNode(pattern, path string) *yaml.Node {
	if row, leaf := s.shape.rows[pattern]; leaf {
		if e, ok := s.entry(path); ok {
			return e.show(row.Value.show)
		}
		return nil
	}
	n := &yaml.Node{Kind: yaml.MappingNode}
	for _, step := range s.shape.children[pattern] {
		names := []string{step}
		switch step {
		case "[]":
			n.Kind = yaml.SequenceNode
			for _, item := range s.children[path] {
				n.Content = append(n.Content, s.showNode(below(pattern, step), item))
			}
			continue
		case "*":
			names = s.children[path]
			if _, leaves := s.shape.rows[below(pattern, step)]; leaves {
				names = slices.Sorted(maps.Keys(s.valuesBelow(path)))
			}
		}
		for _, name := range names {
			if child := s.showNode(below(pattern, step), below(path, name)); child != nil {
				n.Content = append(n.Content, textNode(name), child)
			}
		}
	}
	if len(n.Content) == 0 {
		return nil
	}
	return n
}

// valuesBelow returns the values in a section with keys that the file chooses.
func (s *Set) valuesBelow(section string) map[string]any {
	values := map[string]any{}
	for _, key := range s.children[section] {
		if e, ok := s.entries[below(section, key)]; ok {
			values[key] = e.value
		}
	}
	return values
}

func (e entry) show(text func(any) string) *yaml.Node {
	n := scalarNode(e.value)
	if value := reflect.ValueOf(e.value); text != nil {
		n = textNode(text(e.value))
	} else if value.Kind() == reflect.Slice {
		n = &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
		for i := range value.Len() {
			n.Content = append(n.Content, scalarNode(value.Index(i).Interface()))
		}
	}
	n.LineComment = e.origin.String()
	return n
}

// isSecret reports whether a part of the value is not shown.
func (e entry) isSecret(v Value) bool {
	n := e.show(v.show)
	return strings.Contains(n.Value, Mask) || slices.ContainsFunc(n.Content, func(item *yaml.Node) bool { return strings.Contains(item.Value, Mask) })
}

func textNode(text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: plain.Line(text)}
}

// scalarNode writes a value as the file would spell it. Numbers and booleans need no quotes. A text
// gets them where YAML would read something else.
func scalarNode(value any) *yaml.Node {
	switch v := value.(type) {
	case time.Duration:
		return textNode(ShortDuration(v))
	case int, float64, bool:
		return &yaml.Node{Kind: yaml.ScalarNode, Value: fmt.Sprint(v)}
	}
	return textNode(fmt.Sprint(value)) // secrets mask themselves
}

// ShortDuration writes 5m0s as 5m.
func ShortDuration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}
