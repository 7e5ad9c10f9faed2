package inbox

import (
	"slices"
	"testing"
)

// How many events may be recorded at once depends on what the process works.
func TestRecordersLeaveRoomToWorkers(t *testing.T) {
	t.Parallel()
	const byPool, besideBacklog = 8, 2
	in := &engine{recording: make(chan struct{}, byPool), beside: make(chan struct{}, besideBacklog), runners: map[*runner]struct{}{}}
	wantRoom := func(want ...int) {
		t.Helper()
		got := []int{}
		for _, room := range in.recordingRoom() {
			got = append(got, cap(room))
		}
		if !slices.Equal(got, want) {
			t.Errorf("room for %v, want %v", got, want)
		}
	}
	wantRoom() // it only records
	s := &runner{engine: in}
	in.join(s)
	wantRoom(byPool)
	s.behind.Store(true)
	wantRoom(besideBacklog, byPool)
	s.behind.Store(false)
	wantRoom(byPool)
	in.leave(s)
	wantRoom()
}
