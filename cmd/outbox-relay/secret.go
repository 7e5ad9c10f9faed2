package main

import (
	"fmt"
	"io"
)

// A secret is a text that must not be shown: formatting it, and encoding it as JSON, YAML or text, yields a mask. What
// needs the text itself converts it, visibly: string(s).
type secret string

const mask = "***"

// Format masks the secret for every verb; String alone would leave %d and %x to print its bytes.
func (secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, mask) }

// MarshalText masks the secret for JSON, YAML and logs.
func (secret) MarshalText() ([]byte, error) { return []byte(mask), nil }
