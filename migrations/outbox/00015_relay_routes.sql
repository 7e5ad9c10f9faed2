-- What each relay is configured for, so that no relay's start or stop removes routes that another live relay has.

-- +goose Up
CREATE TABLE outbox_relay_destination (
    instance    integer          NOT NULL REFERENCES outbox_relay ON DELETE CASCADE,
    destination text COLLATE "C" NOT NULL,
    PRIMARY KEY (destination, instance)
);

COMMENT ON TABLE outbox_relay_destination IS 'Which destinations each registered relay delivers to. Pending deliveries of any other destination are unserved.';

CREATE TABLE outbox_relay_route (
    instance    integer          NOT NULL REFERENCES outbox_relay ON DELETE CASCADE,
    pattern     text COLLATE "C" NOT NULL,
    destination text COLLATE "C" NOT NULL,
    PRIMARY KEY (pattern, destination, instance)
);

-- To remove a relay's routes with its row.
CREATE INDEX outbox_relay_route_instance ON outbox_relay_route (instance);

COMMENT ON TABLE outbox_relay_route IS 'The routes that each registered relay was configured with; one that stops withdraws its own first. outbox_route is the union of them, or what it was while there are none.';
COMMENT ON TABLE outbox_route IS 'Which event types go to which destination: the routes of all registered relays together. Relays keep it so.';

-- +goose Down
COMMENT ON TABLE outbox_route IS 'Which event types go to which destination; relays keep it equal to their configuration.';
DROP TABLE outbox_relay_route;
DROP TABLE outbox_relay_destination;
