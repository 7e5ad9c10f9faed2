// Package testkit has what tests of every module share. It needs no database, and no package
// outside of the standard library.
package testkit

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
)

// Patience bounds every wait: a test that reaches it has waited for something that does not come.
// It measures nothing.
const Patience = 2 * time.Minute

// Must ends the test when err is not nil. Call it on the test's own goroutine.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Equal reports what is not as it has to be. Unlike [Must] it may be called on any goroutine, and
// lets the test continue.
func Equal[T any](t testing.TB, what string, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %+v, want %+v", what, got, want)
	}
}

// Contains reports a text that lacks one of the parts.
func Contains(t testing.TB, what, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%s: %q is not in\n%s", what, part, text)
		}
	}
}

// ErrorIs reports an error that is not the wanted one.
func ErrorIs(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// ErrorContains reports an error that is none, or does not say so.
func ErrorContains(t testing.TB, what string, err error, text string) {
	t.Helper()
	if err == nil || text == "" || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: %v, want an error that says %q", what, err, text)
	}
}

// Eventually waits until done is true. It is for what no hook reports, such as what stands in the
// database.
func Eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.After(Patience)
	for !done() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("never came: %s", what)
		}
	}
}

// A Buffer collects what several goroutines write. Its zero value is empty.
type Buffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}
