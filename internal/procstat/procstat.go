// Package procstat reads from Linux's /proc how much processor time processes have used. Elsewhere,
// and for a process that does not exist, everything is zero.
package procstat

import (
	"os"
	"strconv"
	"strings"
	"time"
)

// hertz is the unit of /proc/*/stat: 10 ms on every system that Go runs on.
const hertz = 100

// Positions in /proc/PID/stat, counted from the field behind the name.
const (
	parentField    = 1
	userField      = 11 // the next one is the time in the kernel, the next two those of dead children
	childrenFields = 13
	endOfTimes     = 15
)

// Process returns the processor time that a process has used so far, without its children.
func Process(pid int) time.Duration {
	if f := fields(strconv.Itoa(pid)); len(f) >= endOfTimes {
		return ticks(f[userField:childrenFields])
	}
	return 0
}

// Family returns the processor time that a process and its children have used so far, those that
// have ended included.
func Family(pid int) (used time.Duration) {
	parent := strconv.Itoa(pid)
	entries, _ := os.ReadDir("/proc") // absent on other systems
	for _, entry := range entries {
		switch f := fields(entry.Name()); {
		case len(f) < endOfTimes:
		case entry.Name() == parent:
			used += ticks(f[userField:endOfTimes])
		case f[parentField] == parent:
			used += ticks(f[userField:childrenFields])
		}
	}
	return used
}

// Parent returns the process that started pid; 0: there is none. The program of pid must be called
// name: in another namespace the number may be that of another process.
func Parent(pid int, name string) int {
	comm, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	f := fields(strconv.Itoa(pid))
	if strings.TrimSpace(string(comm)) != name || len(f) < endOfTimes {
		return 0
	}
	parent, _ := strconv.Atoi(f[parentField]) // the kernel writes numbers
	return parent
}

// Machine returns how long the processors of the machine have worked so far, and how long they
// could have.
func Machine() (busy, capacity time.Duration) {
	text, _ := os.ReadFile("/proc/stat") // absent on other systems
	line, _, _ := strings.Cut(string(text), "\n")
	const idle, waiting, guests = 4, 5, 9 // the times of guests are part of others
	for i, field := range strings.Fields(line) {
		if i == 0 || i >= guests {
			continue
		}
		used := ticks([]string{field})
		capacity += used
		if i != idle && i != waiting {
			busy += used
		}
	}
	return busy, capacity
}

// fields returns what stands in a process's stat behind its name, which may contain blanks and
// brackets.
func fields(pid string) []string {
	text, err := os.ReadFile("/proc/" + pid + "/stat") //nolint:gosec // the name is a number, or one that the directory has
	end := strings.LastIndexByte(string(text), ')')
	if err != nil || end < 0 {
		return nil
	}
	return strings.Fields(string(text[end+1:]))
}

func ticks(fields []string) (used time.Duration) {
	for _, field := range fields {
		n, _ := strconv.Atoi(field) // the kernel writes numbers
		used += time.Duration(n) * time.Second / hertz
	}
	return used
}
