package cli

import (
	"os"
	"strconv"
	"strings"
	"syscall"
)

// ReleaseProgram gives back the pages of the program's file that the start has read, most of which
// no command that lasts reads again. What is needed later comes back from the system's cache.
// Whatever fails here costs memory alone.
func ReleaseProgram() {
	program, err := os.Executable()
	if err != nil {
		return
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return
	}
	for line := range strings.Lines(string(maps)) {
		// address range, permissions, offset, device, inode, path
		fields := strings.Fields(line)
		if len(fields) != 6 || fields[5] != program || strings.Contains(fields[1], "w") {
			continue
		}
		from, to, _ := strings.Cut(fields[0], "-")
		begin, beginErr := strconv.ParseUint(from, 16, 64)
		end, endErr := strconv.ParseUint(to, 16, 64)
		if beginErr == nil && endErr == nil && begin < end {
			_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, uintptr(begin), uintptr(end-begin), syscall.MADV_DONTNEED)
		}
	}
}
