// Package hangup keeps SIGHUP from ending a process that has just been started and handles the
// signal later.
//
// Go ends a process at a SIGHUP that comes before [os/signal.Notify], which main calls after all
// packages have been initialised: some 10 ms after exec. A service manager may send one in that
// time, to reload a configuration that has just changed. This package ignores the signal from its
// own initialisation on. It imports syscall alone, so that it is initialised before nearly all
// others.
package hangup
