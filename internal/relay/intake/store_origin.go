package intake

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// FindOrigin returns what the server says of itself that db leads to, for [Rebase]. It returns
// ErrNoIntake as [CheckOrigin] does.
func FindOrigin(ctx context.Context, db pg.DB) (found Origin, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var recorded Origin
	var begun, future bool
	into := []any{&recorded.SystemIdentifier, &recorded.Timeline, &found.SystemIdentifier, &found.Timeline, &found.recordedBefore, &begun, &future}
	err = db.QueryRow(ctx, selectOrigin).Scan(into...)
	if pg.HasCode(err, pg.LacksPrivilege) {
		err = db.QueryRow(ctx, selectOriginWithoutControl).Scan(into...)
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows), err == nil && !begun:
		return Origin{}, ErrNoIntake
	case err != nil:
		return Origin{}, fmt.Errorf("find origin of the transaction ids: %w", err)
	}
	return found, nil
}
