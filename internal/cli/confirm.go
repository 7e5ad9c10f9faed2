package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli/output"
)

// Confirm asks whether to do what cannot be taken back lightly; what is a sentence without its full
// stop. Without a terminal nothing is done; no text suggests the flag that skips the question.
// refused is the error's text after a no.
func (inv *Invocation) Confirm(what, refused string) error {
	if !output.IsTerminal(inv.Stdin) {
		return ExitError{Code: ExitUsage, Err: errors.New(what + "; nothing was done: run the command on a terminal, where it asks first")}
	}
	fmt.Fprintf(inv.Stderr, "%s.\nContinue? [y/N] ", what)
	answered := make(chan string, 1)
	go func() { // nothing can end the read before the process ends; a signal must not wait for it
		answer, _ := bufio.NewReader(inv.Stdin).ReadString('\n')
		answered <- strings.ToLower(strings.TrimSpace(answer))
	}()
	select {
	case answer := <-answered:
		if answer == "y" || answer == "yes" {
			return nil
		}
		return ExitError{Code: ExitUsage, Err: errors.New(refused)}
	case <-inv.Ctx.Done():
		return context.Cause(inv.Ctx)
	}
}
