package drill

import (
	"context"
	"time"
)

// A Probe returns how many effects an idempotency key has had. It is called from several goroutines.
type Probe func(ctx context.Context, key string) (int, error)

// An audit is what a check has seen, and what must still hold at the end: a receiver that works later may do more than it should.
type audit struct {
	check string
	keys  []string
	most  int
}

// effects checks that keys have had from least to most effects together, within [Config.Settle]. Without a probe all is well.
func (t *trial) effects(least, most int, keys ...string) finding {
	return t.effectsUntil(time.Now().Add(t.Settle), least, most, keys...)
}

// effectGap is how long a probe rests.
const effectGap = 20 * time.Millisecond

func (t *trial) effectsUntil(end time.Time, least, most int, keys ...string) finding {
	if t.Probe == nil {
		return finding{}
	}
	t.mu.Lock()
	t.audits = append(t.audits, audit{t.check, keys, most})
	t.mu.Unlock()
	for {
		switch n, err := t.count(t.ctx, keys); {
		case err != nil:
			return fault("the probe failed: %v", err)
		case n > most:
			return tooMany(n, most)
		case n >= least:
			return finding{}
		case time.Now().After(end) && n == 0:
			return fault("it had no effect, although the event was accepted: it is lost")
		case time.Now().After(end):
			return fault("there are %d effects of %d: the others are lost, although they were accepted", n, least)
		}
		if !pause(t.ctx, effectGap) {
			return fault("the drill was ended")
		}
	}
}

func tooMany(n, most int) finding {
	if most == 0 {
		return fault("it took effect")
	}
	return fault("it had %d effects instead of %d", n, most)
}

// count returns how many effects keys have had together.
func (d *drill) count(ctx context.Context, keys []string) (total int, err error) {
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
		n, err := d.count(ctx, a.keys)
		for i := range results {
			if r := &results[i]; err == nil && n > a.most && r.Name == a.check && r.Outcome != Failed {
				r.Outcome, r.Found = Failed, tooMany(n, a.most).text+"; the last one came later"
			}
		}
	}
}
