package hangup

import (
	"syscall"
	"unsafe"
)

// A sigaction is the kernel's struct sigaction of 64-bit systems, which is also that of
// sigaction(2) without a C library.
type sigaction struct {
	handler  uintptr
	flags    uint64
	restorer uintptr
	mask     uint64
}

const ignore = 1 // SIG_IGN

// before is what was done at SIGHUP before this package ignored it: what the runtime had installed,
// or nothing if the process was started with the signal ignored.
var before = ignoreHangups()

func ignoreHangups() (before sigaction) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		return sigaction{handler: ignore}
	}
	if !exchange(nil, &before) || before.handler == ignore || !exchange(&sigaction{handler: ignore, flags: before.flags, restorer: before.restorer}, nil) {
		return sigaction{handler: ignore}
	}
	return before
}

// Handle gives SIGHUP back to the runtime: from then on it does what [os/signal.Notify] was told,
// or ends the process. A signal that came before is lost. It does nothing if the process was
// started with the signal ignored.
func Handle() {
	if before.handler != ignore {
		exchange(&before, nil)
	}
}

// exchange sets the action unless it is nil, stores the one before it unless that is nil, and
// reports success.
func exchange(action, old *sigaction) bool {
	//nolint:gosec // the kernel reads and writes these structs during the call alone, and their layout is checked above
	_, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(syscall.SIGHUP), uintptr(unsafe.Pointer(action)), uintptr(unsafe.Pointer(old)),
		unsafe.Sizeof(sigaction{}.mask), 0, 0)
	return errno == 0
}
