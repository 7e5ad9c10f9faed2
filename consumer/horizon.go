package consumer

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// minRetention catches durations written in the wrong unit, such as Retention: 90, which would empty the memory. Every
// sender that retries at all does so for hours.
const minRetention = 24 * time.Hour

// memoryProblem returns what is wrong with remembering for so long what the sender may send again for so long; empty:
// nothing. 0 is a time that is not known.
func memoryProblem(retention, senderHorizon time.Duration) string {
	switch {
	case senderHorizon < 0:
		return fmt.Sprintf("SenderHorizon is negative: %v", senderHorizon)
	case retention == 0:
		return ""
	case retention < minRetention:
		return fmt.Sprintf("Retention: %v is less than a day, within which any sender sends again; set %v or more", retention, minRetention)
	case retention <= senderHorizon:
		return fmt.Sprintf("Retention: %v is not longer than the sender may send an event again (SenderHorizon, %v), so that late "+
			"duplicates would be refused; set more", retention, senderHorizon)
	}
	return ""
}

// compareHorizon tells, once, of a sender that sends for longer than this receiver means to remember. It does no harm,
// since no row is removed before its sender has given up, and a store's middleware refuses what is so late, but one of the
// two is not configured as somebody believes.
func (s *settings) compareHorizon(ctx context.Context, rq *request) {
	known := s.expires && rq.event.CreatedAt.IsZero() // until then; see knownFor
	if s.Retention == 0 || known || rq.event.NotAfter.Sub(rq.began) <= s.Retention || s.horizonTold.Swap(true) {
		return
	}
	message := "consumer: the sender may send events again for longer than Config.Retention; their rows are kept until then"
	if s.expires {
		message = "consumer: the sender may send events again for longer than StoreConfig.TTL; what arrives later than that is refused"
	}
	s.logger().LogAttrs(ctx, slog.LevelWarn, message,
		slog.String("receiver", s.Receiver), slog.String("source", s.Source),
		slog.Time("not_after", rq.event.NotAfter),
		slog.Duration("retention", s.Retention))
}
