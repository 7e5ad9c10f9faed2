// Package localpg runs a throwaway PostgreSQL from the binaries installed on
// this machine: for the demo, for benchmarks and, through its sub-package
// pgtest, for every test of this module.
//
// A [Server] lives in one directory of its own under /tmp, listens on a unix
// socket inside it and leaves nothing behind, however its owner ends:
//
//	owner ──pipe──▶ janitor (/bin/sh, own session) ──child──▶ postgres
//
// The janitor makes the directory, runs initdb, starts PostgreSQL and waits on
// the pipe. When the pipe closes, because of [Server.Stop] or because the owner
// crashed, was interrupted or was killed with SIGKILL, it stops PostgreSQL and
// removes the directory. There is no moment at which a directory or a process
// exists that the janitor does not know of. Should the janitor itself be killed,
// or the machine restart, the next [Start] sweeps up what was left.
//
// Started by root, everything runs as the unprivileged account postgres (or
// nobody), because PostgreSQL refuses to run as root.
package localpg
