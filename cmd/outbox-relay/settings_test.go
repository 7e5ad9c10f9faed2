package main

import (
	"fmt"
	"strings"
)

// usualFile is the name of a configuration file.
const usualFile = "outbox-relay.yaml"

const (
	goodSecret  = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
	otherSecret = "whsec_OTg3NjU0MzIxMDk4NzY1NDMyMTA5ODc2NTQzMjEwOTg="
)

// The environment that needs nothing else.
var twoSettings = []string{"OUTBOX_DATABASE_URL=postgres://u:p@localhost/db", "OUTBOX_DESTINATION_URL=https://logistics.internal/in"}

// mistakes returns what stderr must hold for these lines.
func mistakes(lines ...string) string {
	end := fmt.Sprintf("%d problems. Nothing was started.\n", len(lines))
	if len(lines) == 1 {
		end = "1 problem. Nothing was started.\n"
	}
	return strings.Join(append(lines, end), "\n")
}
