package status

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// Audit is the command audit.
type Audit struct {
	config.DatabaseFlags
	Before int64 `placeholder:"ID" help:"Only entries with a number below this one, such as the last one of a page before."`
	Limit  int   `default:"50" help:"How many at most."`
	JSON   bool  `help:"Print JSON: an array of entries. Fields are added, never renamed or removed."`
}

func (Audit) Help() string {
	return `Lists what operators changed and revealed, by commands, the page and the API: when, who, through what, which deliveries, and how many were
changed. The times are in UTC. The role outbox_reader is enough.`
}

func (cmd Audit) Run(inv *cli.Invocation) error {
	if cmd.Limit < 1 || cmd.Limit > 10_000 {
		return cli.Usagef("--limit: %d is out of range; write 1 to 10000", cmd.Limit)
	}
	if cmd.Before < 0 {
		return cli.Usagef("--before: %d is no number of an entry; write 1 or more", cmd.Before)
	}
	var list []ops.AuditEntry
	err := config.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) (err error) {
		list, err = outbox.Audit(ctx, cmd.Before, cmd.Limit)
		return err
	})
	if err != nil {
		return err
	}
	if err := output.Show(inv.Stdout, cmd.JSON, output.OrEmpty(list), printAudit); err != nil || len(list) < cmd.Limit {
		return err
	}
	_, err = fmt.Fprintf(inv.Stderr, "There may be more: repeat the command with --before %d\n", list[len(list)-1].ID)
	return err
}

func printAudit(w io.Writer, list []ops.AuditEntry) error {
	const header = "ENTRY\tWHEN\tWHO\tBY\tACTION\tSTATE\tDONE\tWHICH"
	return output.List(w, "No entry: nothing was changed or revealed.", header, list, func(e ops.AuditEntry) []any {
		return []any{e.ID, e.At, e.Actor, e.Origin, e.Action, e.State, e.Done, which(e)}
	})
}

// which names what an entry is about.
func which(e ops.AuditEntry) string {
	var parts []string
	switch {
	case e.EventID != nil:
		parts = append(parts, fmt.Sprintf("event %d", *e.EventID))
	case e.Selection != nil:
		shown := *e.Selection
		shown.SeenAt, shown.SeenEvent = time.Time{}, 0 // WHEN is close to it
		if text, err := json.Marshal(shown); err == nil {
			parts = append(parts, string(text))
		}
	case e.Destination != nil:
		parts = append(parts, *e.Destination)
	}
	if e.Detail != nil && *e.Detail != "" {
		parts = append(parts, *e.Detail)
	}
	return strings.Join(parts, ": ")
}
