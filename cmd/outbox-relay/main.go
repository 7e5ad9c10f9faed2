// Command outbox-relay delivers the events that a service commits to its outbox table. Run it
// without arguments for help.
package main

import (
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/hangup"
)

func main() {
	hangups := hangups(os.Args[1:])
	setUpLibraries()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	m := Main{
		Env: os.Environ(), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Signals: signals, Hangups: hangups,
		StandardLog: func(w io.Writer) {
			log.SetFlags(0)
			log.SetOutput(w)
		},
	}
	os.Exit(m.Run(os.Args[1:]))
}

// setUpLibraries sets what libraries keep for the whole process: the zone of times, and zerolog's
// field names and times. A log that cannot be written, its disk full or its reader gone, stops
// nothing; stderr has no room for a message about itself.
func setUpLibraries() {
	time.Local = time.UTC // in which pgx returns times: they are printed as they are
	zerolog.MessageFieldName = "msg"
	zerolog.TimeFieldFormat = "2006-01-02T15:04:05.000Z07:00"
	zerolog.TimestampFunc = func() time.Time { return time.Now().UTC() }
	zerolog.ErrorHandler = func(error) {}
}

// hangups returns the signals that ask run to reload, from the very start: package hangup has
// ignored those that came earlier. To any other command a closed terminal is the end.
func hangups(args []string) <-chan os.Signal {
	defer hangup.Handle() // not before Notify
	if len(args) == 0 || args[0] != "run" {
		return nil
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP)
	return signals
}

// Main is the program without the process around it.
type Main cli.Program

// Run runs one command and returns the exit code.
func (m Main) Run(args []string) int {
	m.Grammar, m.Overview, m.Version = new(grammar), overview, buildInfo().Version
	return cli.Program(m).Run(args)
}
