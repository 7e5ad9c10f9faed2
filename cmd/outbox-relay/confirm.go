package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"
)

// confirm asks whether to do what cannot be taken back lightly; what is a sentence without its full stop. Without a
// terminal, --yes must have been given instead of asking. refused is the error's text after a no.
func (inv *invocation) confirm(what, refused string) error {
	if !isTerminal(inv.Stdin) {
		return exitError{code: exitUsage, err: errors.New(what + "; repeat the command with --yes to do it")}
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
		return exitError{code: exitUsage, err: errors.New(refused)}
	case <-inv.ctx.Done():
		return context.Cause(inv.ctx)
	}
}
