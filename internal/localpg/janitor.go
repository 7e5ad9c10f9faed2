package localpg

import (
	"bufio"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
)

//go:embed janitor.sh
var janitorScript string

// janitor is the process that owns a directory and the server in it. It is a shell
// in its own session, so that neither Ctrl-C nor the death of this process
// reaches it other than as the end of its standard input.
type janitor struct {
	cmd *exec.Cmd
	in  io.WriteCloser

	mu  sync.Mutex // guards out, and keeps a question next to its answer
	out *bufio.Reader
}

// startJanitor starts the janitor that a script describes, which makes dir, and returns once dir
// exists. The pipes are close-on-exec: another child of this process does not keep the janitor
// waiting after this process is gone.
func startJanitor(script, dir, program string, as account, options []string, env ...string) (*janitor, error) {
	args := append([]string{"-c", script, "janitor", dir, program}, options...)
	cmd := exec.Command("/bin/sh", args...)
	cmd.Dir = "/" // the account may not be able to enter the current directory
	// A fixed environment: no PG* variable changes the server, and with TZ set
	// initdb does not search the time zone database for the local one.
	cmd.Env = append([]string{"PATH=/usr/bin:/bin", "LC_ALL=C", "TZ=UTC"}, env...)
	runAs(cmd, as, true)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("open pipe to janitor: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("open pipe from janitor: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start janitor: %w", err)
	}
	j := &janitor{cmd: cmd, in: in, out: bufio.NewReader(out)}
	switch reply, err := j.reply(); {
	case err != nil:
		return nil, errors.Join(err, j.dismiss())
	case reply != "ok":
		_ = j.dismiss() // it already exited, and the reply says why
		return nil, fmt.Errorf("make directory: %s", reply)
	}
	return j, nil
}

// ask sends one line and returns the line that answers it. Every answer comes
// within milliseconds, that to "init" within about a second.
func (j *janitor) ask(words ...any) (string, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, err := fmt.Fprintln(j.in, words...); err != nil {
		return "", fmt.Errorf("ask janitor: %w", err)
	}
	return j.reply()
}

func (j *janitor) reply() (string, error) {
	line, err := j.out.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("read janitor's answer: %w", err)
	}
	return strings.TrimSpace(line), nil
}

// dismiss closes the pipe and waits until the janitor has cleaned up and gone.
func (j *janitor) dismiss() error {
	j.in.Close() // fails only when closed before
	if err := j.cmd.Wait(); err != nil {
		return fmt.Errorf("wait for janitor: %w", err)
	}
	return nil
}
