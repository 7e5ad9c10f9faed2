package compare

import "time"

// A Report is what a run found. Its times are those of the sender's database, except ReceivedAt.
type Report struct {
	Destinations []string `json:"destinations"`
	Receiver     string   `json:"receiver"`
	Source       string   `json:"source"`

	// Since bounds what was compared: deliveries, and events received, from then on. SinceReason
	// says what made it so late: since (Options.Since), sender or receiver (which keeps nothing
	// earlier). Nil: everything was compared.
	Since       *time.Time `json:"since"`
	SinceReason string     `json:"since_reason,omitempty"`
	// Until is before when an event was delivered to be compared.
	Until time.Time `json:"until"`
	// SenderKeepsSince and ReceiverKeepsSince say what each side still has. Nil: everything.
	SenderKeepsSince   *time.Time `json:"sender_keeps_since"`
	ReceiverKeepsSince *time.Time `json:"receiver_keeps_since"`

	// Sent and Received count what was compared, so Received leaves out what is Drilled.
	Sent     int64 `json:"sent"`
	Received int64 `json:"received"`
	// Ranges of keys, and how many of them differed. RowsRead counts the rows that both sides then
	// read one by one.
	Ranges    int   `json:"ranges"`
	Differing int   `json:"differing_ranges"`
	RowsRead  int64 `json:"rows_read"`

	// What the sender does not count as delivered and compared: Young was delivered after Until,
	// Earlier before Since.
	Young     int64 `json:"young"`
	Earlier   int64 `json:"earlier"`
	Pending   int64 `json:"pending"`
	Failed    int64 `json:"failed"`
	Discarded int64 `json:"discarded"`

	// Complete: no list below was cut at Options.Limit.
	Complete bool `json:"complete"`
	// NeverArrived was delivered, and the receiver does not have it.
	NeverArrived []Finding `json:"never_arrived"`
	// NoEffect has arrived, and is neither done nor given up.
	NoEffect []Finding `json:"no_effect"`
	// Strangers took effect, and the sender has no such event.
	Strangers []Finding `json:"effect_without_event"`
	// Doubled took effect more than once, and Missing was processed and has no effect.
	// CountsEffects says whether the receiver can tell.
	Doubled       []Finding `json:"effect_twice"`
	Missing       []Finding `json:"processed_no_effect"`
	CountsEffects bool      `json:"counts_effects"`
	// Forgotten counts the keys that one side has and the other may have forgotten. They are no
	// findings.
	Forgotten int64 `json:"forgotten"`
	// Drilled counts what a drill (outbox-relay drill) left at the receiver. Nothing of it is a
	// finding.
	Drilled int64 `json:"drilled"`
}

// Findings counts what is named.
func (r *Report) Findings() int {
	return len(r.NeverArrived) + len(r.NoEffect) + len(r.Strangers) + len(r.Doubled) + len(r.Missing)
}

// A Finding is a key for which both sides disagree. What is not known of it is left out.
type Finding struct {
	Key         string     `json:"key"`
	EventID     int64      `json:"event_id,omitempty,string"`
	EventType   string     `json:"event_type,omitempty"`
	Destination string     `json:"destination,omitempty"`
	Archived    bool       `json:"archived,omitempty"` // the event is in the archive, so it cannot be replayed
	CreatedAt   *time.Time `json:"created_at,omitempty"`
	DeliveredAt *time.Time `json:"delivered_at,omitempty"`
	ReceivedAt  *time.Time `json:"received_at,omitempty"`
	State       string     `json:"state,omitempty"` // at the receiver
	Effects     int64      `json:"effects,omitempty"`
}
