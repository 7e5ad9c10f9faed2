package testkit

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
)

// A Child is a process that a test has started.
type Child struct {
	Cmd   *exec.Cmd
	Ended chan struct{} // closed when the process is gone and all its lines have been passed on
	Err   error         // how it ended, once Ended is closed
}

// StartChild starts a command. each gets the lines of pipe, which is cmd.StdoutPipe or
// cmd.StderrPipe.
func StartChild(cmd *exec.Cmd, pipe func() (io.ReadCloser, error), each func(line string)) (*Child, error) {
	out, err := pipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	c := &Child{Cmd: cmd, Ended: make(chan struct{})}
	go func() {
		defer close(c.Ended)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			each(lines.Text())
		}
		c.Err = cmd.Wait()
	}()
	return c, nil
}
