-- A session keeps the plan of the trigger's statement as it was for the first statement that inserted events. If those were 9,000 or more, the
-- plan is so dear that PostgreSQL compiles it (jit) at each execution: every single event after that took 8 ms, and 200 to 600 ms after 200,000.

-- +goose Up
ALTER FUNCTION outbox_fan_out() SET jit = off;

-- +goose Down
ALTER FUNCTION outbox_fan_out() RESET jit;
