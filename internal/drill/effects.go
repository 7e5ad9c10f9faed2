package drill

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A Probe returns how many effects an idempotency key has had. It is called from several
// goroutines.
type Probe func(ctx context.Context, key string) (int, error)

// An audit is what a check has seen, and what must still hold at the end: a receiver that works
// later may do more than it should.
type audit struct {
	check string
	keys  []string
	most  int
}

// effects checks that keys have had from least to most effects together, within [Config.Settle].
// Without a probe all is well.
func (t *trial) effects(least, most int, keys ...string) {
	t.effectsUntil(time.Now().Add(t.Settle), least, most, keys...)
}

// effectGap is how long a probe rests.
const effectGap = 20 * time.Millisecond

func (t *trial) effectsUntil(end time.Time, least, most int, keys ...string) {
	if t.Probe == nil {
		return
	}
	t.mu.Lock()
	t.audits = append(t.audits, audit{t.check, keys, most})
	t.mu.Unlock()
	for n := t.count(keys...); n < least || n > most; n = t.count(keys...) {
		switch late := time.Now().After(end); {
		case n > most:
			t.fault("%s", tooMany(n, most))
		case late && n == 0:
			t.fault("it had no effect, although the event was accepted: it is lost")
		case late || sleep.For(t.ctx, effectGap) != nil:
			t.fault("there are %d effects of %d: the others are lost, although they were accepted", n, least)
		}
	}
}

func tooMany(n, most int) string {
	if most == 0 {
		return "it took effect"
	}
	return fmt.Sprintf("it had %d effects instead of %d", n, most)
}

// count returns how many effects keys have had together.
func (t *trial) count(keys ...string) int {
	n, err := t.countAll(t.ctx, keys)
	if err != nil {
		t.fault("the probe failed: %v", err)
	}
	return n
}

func (d *drill) countAll(ctx context.Context, keys []string) (total int, err error) {
	for _, key := range keys {
		n, err := d.Probe(ctx, key)
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

// audit looks for effects that came after their check had passed.
func (d *drill) audit(ctx context.Context, results []Result) {
	for _, a := range d.audits {
		r := &results[slices.IndexFunc(results, func(r Result) bool { return r.Name == a.check })]
		if n, err := d.countAll(ctx, a.keys); err == nil && n > a.most && r.Outcome != Failed {
			r.Outcome, r.Found = Failed, tooMany(n, a.most)+"; the last one came later"
		}
	}
}
