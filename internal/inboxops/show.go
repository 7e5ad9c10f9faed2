package inboxops

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// A Memory is what a receiver remembers of an event in processed_events. State is recorded where an
// inbox has the event, and that knows more.
type Memory struct {
	Received
	LastError      *string    `json:"last_error"` // why it was ignored
	ResponseStatus *int       `json:"response_status"`
	NotAfter       *time.Time `json:"not_after"`
	Destination    *string    `json:"destination"` // by which it came, if its sender said so
}

// A MemoryPage is a part of a list of what is remembered.
type MemoryPage struct {
	Remembered []Memory `json:"remembered"`
	// Next is the event behind which the following part begins; nil: there are no more.
	Next *MemoryKey `json:"-"`
}

// A MemoryKey is the key of an event in the memory.
type MemoryKey struct{ Receiver, Source, IdempotencyKey string }

// Remembered returns what the memory has of the selection, in the order of receiver, source and
// key, behind the given event: at most s.Limit. The memory knows neither inbox ids nor ordering
// keys.
func (o *Ops) Remembered(ctx context.Context, s Selection, after MemoryKey) (page MemoryPage, err error) {
	if err := s.check([]string{Succeeded, Ignored, Recorded}); err != nil {
		return MemoryPage{}, err
	}
	var list []Sender
	err = o.read(ctx, func(tx pgx.Tx) error {
		list, err = remembered(ctx, tx, s.Receiver, s.Source)
		return err
	})
	for _, sender := range list {
		if err != nil || page.Next != nil {
			break
		}
		if sender.Receiver < after.Receiver || sender.Receiver == after.Receiver && sender.Source < after.Source {
			continue
		}
		key := ""
		if sender == (Sender{after.Receiver, after.Source}) {
			key = after.IdempotencyKey
		}
		err = o.rememberedOf(ctx, sender, key, s, &page)
	}
	if err != nil {
		return MemoryPage{}, fmt.Errorf("list what is remembered: %w", err)
	}
	return page, nil
}

// rememberedOf adds what is remembered of one sender behind a key, until the page is full.
func (o *Ops) rememberedOf(ctx context.Context, sender Sender, after string, s Selection, page *MemoryPage) error {
	for more := true; more; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		err := o.read(ctx, func(tx pgx.Tx) error {
			var until *string // a key alone is found by the index
			if s.Key == "" {
				var err error
				if until, err = memoryReach(ctx, tx, sender, after); err != nil {
					return err
				}
			}
			room := s.Limit - int64(len(page.Remembered))
			found, err := memoryBetween(ctx, tx, sender, after, until, s, room+1)
			if err != nil {
				return err
			}
			page.Remembered = append(page.Remembered, found...)
			if more = until != nil; more {
				after = *until
			}
			return nil
		})
		if err != nil {
			return err
		}
		if int64(len(page.Remembered)) > s.Limit {
			page.Remembered = page.Remembered[:s.Limit]
			last := page.Remembered[s.Limit-1]
			page.Next = &MemoryKey{last.Receiver, last.Source, last.IdempotencyKey}
			return nil
		}
	}
	return nil
}

// A Shown is all that is known of one event, or of the events of one key at several receivers.
type Shown struct {
	Events     []Event  `json:"events"`
	Remembered []Memory `json:"remembered"`
	Waits      []Wait   `json:"waits"`
}

// A Wait says why a pending event was not worked yet, or what else a person should know of an
// event.
type Wait struct {
	InboxID int64 `json:"inbox_id,string"`
	// Cause: due, not_due, behind, unreleased, processing, failed or blocks. Names are added, never
	// renamed.
	Cause string `json:"cause"`
	// Text says it for people.
	Text string `json:"text"`
}

// Show returns an event by its inbox id, or the events of a key; with what the memory has of them,
// and why they wait.
func (o *Ops) Show(ctx context.Context, id int64, s Selection) (shown Shown, err error) {
	err = o.read(ctx, func(tx pgx.Tx) error {
		shown, err = show(ctx, tx, id, s)
		return err
	})
	if err != nil {
		return Shown{}, fmt.Errorf("show event: %w", err)
	}
	return shown, nil
}

func show(ctx context.Context, tx pgx.Tx, id int64, s Selection) (shown Shown, err error) {
	ids := []int64{id}
	if id == 0 {
		if ids, err = idsOfKey(ctx, tx, s); err != nil {
			return Shown{}, err
		}
	}
	if shown.Events, err = eventsByID(ctx, tx, ids); err != nil {
		return Shown{}, err
	}
	var places []MemoryKey
	for _, e := range shown.Events {
		places = append(places, MemoryKey{e.Receiver, e.Source, e.IdempotencyKey})
	}
	if id == 0 { // also what only the memory has
		list, err := remembered(ctx, tx, s.Receiver, s.Source)
		if err != nil {
			return Shown{}, err
		}
		for _, sender := range list {
			if place := (MemoryKey{sender.Receiver, sender.Source, s.Key}); !slices.Contains(places, place) {
				places = append(places, place)
			}
		}
	}
	if shown.Remembered, err = memoryOf(ctx, tx, places); err != nil {
		return Shown{}, err
	}
	for _, e := range shown.Events {
		around, err := surroundings(ctx, tx, e)
		if err != nil {
			return Shown{}, err
		}
		shown.Waits = append(shown.Waits, e.waits(around)...)
	}
	return shown, nil
}

// around is what stands around an event.
type around struct {
	now    time.Time
	before []neighbour // of its ordering key: those that keep it waiting
	behind int64       // events that wait behind it, at most 10,001
}

// neighbour is another event of the same ordering key.
type neighbour struct {
	InboxID int64
	State   string
}

// waits says why an event was not worked yet, or what keeps others waiting for it.
func (e Event) waits(a around) (all []Wait) {
	add := func(why, format string, args ...any) {
		all = append(all, Wait{e.InboxID, why, fmt.Sprintf(format, args...)})
	}
	switch {
	case e.State == Pending && e.NextAttemptAt == nil && len(a.before) > 0:
		for _, b := range a.before {
			hint := ""
			if b.State == Failed {
				hint = fmt.Sprintf("; to continue: outbox-relay inbox replay %d, or outbox-relay inbox ignore %[1]d", b.InboxID)
			}
			add("behind", "behind inbox id %d of its ordering key, which is %s%s", b.InboxID, b.State, hint)
		}
	case e.State == Pending && e.NextAttemptAt == nil:
		add("unreleased", "nothing keeps it waiting: a running worker releases it within half a minute")
	case e.State == Pending && e.NextAttemptAt.After(a.now):
		add("not_due", "attempt %d is due in %s, at %s", e.Attempts+1, e.NextAttemptAt.Sub(a.now).Round(time.Second), e.NextAttemptAt.UTC().Format(time.RFC3339))
	case e.State == Pending:
		add("due", "due: the next free worker of its receiver takes it; if none does, no worker runs or all are busy")
	case e.State == Processing:
		since := ""
		if e.ClaimedAt != nil {
			since = " since " + e.ClaimedAt.UTC().Format(time.RFC3339)
		}
		by := "a worker"
		if e.ClaimedBy != nil {
			by = "worker " + *e.ClaimedBy
		}
		add("processing", "%s has it%s", by, since)
	case e.State == Failed:
		add("failed", "failed: no worker tries it again; to try it: outbox-relay inbox replay %d", e.InboxID)
		if a.behind > 0 {
			add("blocks", "it may block its ordering key: events wait behind it (%s); to continue without it: outbox-relay inbox ignore %d", plain.UpTo(a.behind, 10_000), e.InboxID)
		}
	}
	return all
}
