// Command outbox-relay delivers the events that a service commits to its outbox table. Run it without arguments for
// help.
package main

import (
	"context"
	"errors"
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	setUpLibraries()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	m := Main{
		Env: os.Environ(), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Signals: signals, Hangups: hangups(os.Args[1:]),
		StandardLog: func(w io.Writer) {
			log.SetFlags(0)
			log.SetOutput(w)
		},
	}
	os.Exit(m.Run(os.Args[1:]))
}

// Main is the program without the process around it.
type Main struct {
	Env            []string // "NAME=value"
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// Signals that ask to stop. The first ends a command gracefully, the second at once.
	Signals <-chan os.Signal
	// Hangups ask run to read its configuration again; nil: there are none.
	Hangups <-chan os.Signal
	// StandardLog says where the standard logger of the process writes to; nil leaves it alone.
	StandardLog func(io.Writer)
}

// Run runs one command and returns the exit code.
func (m Main) Run(args []string) (code int) {
	m.Stdout, m.Stderr = textWriter{m.Stdout, showsColors(m.Stdout, m.Env)}, textWriter{m.Stderr, false}
	ctx, cancel := context.WithCancelCause(context.Background())
	aborted, done, watched := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		m.watch(cancel, aborted, done)
	}()
	defer func() {
		close(done)
		<-watched
		cancel(nil)
	}()
	err := m.command(ctx, aborted, args)
	if err != nil && errors.Is(context.Cause(ctx), errInterrupted) && !errors.As(err, new(exitError)) {
		err = exitError{code: exitInterrupted, err: errInterrupted}
	}
	return m.report(err)
}

// errInterrupted is the cause of a context that a signal ended.
var errInterrupted = errors.New("interrupted")

// watch turns signals into the end of ctx, then of everything, until done.
func (m Main) watch(cancel context.CancelCauseFunc, aborted chan<- struct{}, done <-chan struct{}) {
	select {
	case <-m.Signals:
		cancel(errInterrupted)
	case <-done:
		return
	}
	select {
	case <-m.Signals:
		close(aborted)
	case <-done:
	}
}
