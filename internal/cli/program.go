package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/outbox-relay/outbox-relay/internal/cli/output"
)

// A Program runs commands, without the process around it.
type Program struct {
	// Grammar holds the commands: a pointer to a struct as kong reads it.
	Grammar any
	// Overview is the help of the program itself.
	Overview string
	// Version of this build.
	Version string

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
func (p Program) Run(args []string) (code int) {
	p.Stdout, p.Stderr = output.NewTextWriter(p.Stdout, output.ShowsColors(p.Stdout, p.Env)), output.NewTextWriter(p.Stderr, false)
	ctx, cancel := context.WithCancelCause(context.Background())
	aborted, done, watched := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		p.watch(cancel, aborted, done)
	}()
	defer func() {
		close(done)
		<-watched
		cancel(nil)
	}()
	err := p.command(ctx, aborted, args)
	if err != nil && errors.Is(context.Cause(ctx), ErrInterrupted) && !errors.As(err, new(ExitError)) {
		err = ExitError{Code: ExitInterrupted, Err: ErrInterrupted}
	}
	return report(p.Stderr, err)
}

// ErrInterrupted is the cause of a context that a signal ended.
var ErrInterrupted = errors.New("interrupted")

// watch turns signals into the end of ctx, then of everything, until done.
func (p Program) watch(cancel context.CancelCauseFunc, aborted chan<- struct{}, done <-chan struct{}) {
	select {
	case <-p.Signals:
		cancel(ErrInterrupted)
	case <-done:
		return
	}
	select {
	case <-p.Signals:
		close(aborted)
	case <-done:
	}
}

// An Invocation is what a command has to work with.
type Invocation struct {
	Program
	Ctx     context.Context   // ends with the first signal
	Aborted <-chan struct{}   // closed by the second
	Flags   map[string]string // given on the command line, by name
}

// Getenv returns the value of a variable of the environment, empty if it is not set. Of two of the
// same name the last one counts, as for a program that is started with them.
func (p Program) Getenv(name string) (value string) {
	for _, entry := range p.Env {
		if text, ok := strings.CutPrefix(entry, name+"="); ok {
			value = text
		}
	}
	return value
}

// command parses the arguments and runs what they name.
func (p Program) command(ctx context.Context, aborted <-chan struct{}, args []string) (err error) {
	if len(args) == 0 {
		fmt.Fprint(p.Stderr, p.Overview, "\n")
		return ExitError{Code: ExitUsage, Err: errors.New("no command given")}
	}
	if args[0] == "--version" {
		args[0] = "version"
	}
	if args[0] == "help" {
		args = append(slices.Clone(args[1:]), "--help")
	}
	// Kong ends the process after --help; here it ends this function.
	type helpShown struct{}
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(helpShown); !ok {
				panic(r)
			}
		}
	}()
	parser, err := kong.New(p.Grammar,
		kong.Name("outbox-relay"),
		kong.Writers(p.Stdout, p.Stderr),
		kong.Exit(func(int) { panic(helpShown{}) }),
		kong.Help(func(options kong.HelpOptions, kctx *kong.Context) error {
			if kctx.Selected() == nil && kctx.Command() == "" {
				_, err := io.WriteString(p.Stdout, p.Overview)
				return err
			}
			return kong.DefaultHelpPrinter(options, kctx)
		}),
	)
	if err != nil {
		return err
	}
	kctx, err := parser.Parse(args)
	if err != nil {
		command := "outbox-relay"
		if parse := new(kong.ParseError); errors.As(err, &parse) && parse.Context.Command() != "" {
			command += " " + parse.Context.Command()
		}
		return ExitError{Code: ExitUsage, Err: fmt.Errorf("%w (see: %s --help)", err, command)}
	}
	inv := &Invocation{Program: p, Ctx: ctx, Aborted: aborted, Flags: map[string]string{}}
	for _, flag := range kctx.Flags() {
		if flag.Set {
			inv.Flags[flag.Name] = fmt.Sprint(kctx.FlagValue(flag))
		}
	}
	return kctx.Run(inv)
}
