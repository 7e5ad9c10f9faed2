package settings

import (
	"fmt"
	"io"
)

// A Secret is a text that must not be shown. Formatting it, and encoding it as JSON, YAML or text,
// yields [Mask]. Code that needs the text itself converts it visibly: string(s).
type Secret string

// Mask stands for a secret wherever one would be printed.
const Mask = "***"

// Format writes the mask for every verb; String alone would leave %d and %x to print the bytes.
func (Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, Mask) }

// MarshalText returns the mask, for JSON, YAML and logs.
func (Secret) MarshalText() ([]byte, error) { return []byte(Mask), nil }
