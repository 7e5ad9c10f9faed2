-- What relays know of each other: who is alive and for what, which database this is, and which alert is open.

-- +goose Up
CREATE TABLE outbox_relay (
    -- The number under which a relay claims.
    instance          integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name              text        NOT NULL,
    version           text        NOT NULL,
    started_at        timestamptz NOT NULL DEFAULT now(),
    heartbeat_at      timestamptz NOT NULL DEFAULT now(),
    lease             interval    NOT NULL DEFAULT '60 seconds',
    session_pid       integer,
    server_started_at timestamptz NOT NULL DEFAULT pg_postmaster_start_time(),
    quarantined       text,
    environment       text,
    address           text
) WITH (fillfactor = 50);

-- A session and not an advisory lock shows that the relay lives: any login of the database could hold, or queue for, the lock.
COMMENT ON TABLE outbox_relay IS 'Live relays. A row belongs to a dead relay when its session is gone, when its heartbeat is older than 15 seconds or, without a session, older than its lease. Its claims end with the row.';
COMMENT ON COLUMN outbox_relay.lease IS 'For how long the claims of the relay hold. Without a session, also after how long without a heartbeat it is dead.';
COMMENT ON COLUMN outbox_relay.session_pid IS 'The backend of the relay''s session, whose application_name is ''outbox-relay session '' and the instance. Null, behind a pooler: only an old heartbeat says that the relay is dead.';
COMMENT ON COLUMN outbox_relay.server_started_at IS 'When the server of the session started. A copy of this row on another server has no session there.';
COMMENT ON COLUMN outbox_relay.quarantined IS 'Why the relay does nothing here. Null: it works. Set together with its environment and address, which accepting records.';

CREATE TABLE outbox_relay_destination (
    instance    integer          NOT NULL REFERENCES outbox_relay ON DELETE CASCADE,
    destination text COLLATE "C" NOT NULL,
    PRIMARY KEY (destination, instance)
);

COMMENT ON TABLE outbox_relay_destination IS 'Which destinations each registered relay delivers to. Pending deliveries of any other destination are unserved.';

-- What each relay is configured for, so that no relay's start or stop removes routes that another live relay has.
CREATE TABLE outbox_relay_route (
    instance    integer          NOT NULL REFERENCES outbox_relay ON DELETE CASCADE,
    pattern     text COLLATE "C" NOT NULL,
    destination text COLLATE "C" NOT NULL,
    PRIMARY KEY (pattern, destination, instance)
);

-- To remove a relay's routes with its row.
CREATE INDEX outbox_relay_route_instance ON outbox_relay_route (instance);

COMMENT ON TABLE outbox_relay_route IS 'The routes that each registered relay was configured with; one that stops withdraws its own first. outbox_route is the union of them, or what it was while there are none.';

CREATE TABLE outbox_rescue (
    at       timestamptz NOT NULL DEFAULT now(),
    instance integer     NOT NULL
);

COMMENT ON TABLE outbox_rescue IS 'Relays that were found dead in the last day.';

-- Claims that ended before their lease. A rescue writes one row here instead of changing every delivery: it would have to
-- search all that is pending for them, because no index may hold claimed_by (the claim would not stay heap-only).
CREATE TABLE outbox_void (
    instance integer     NOT NULL,
    -- Which claims of the relay: those whose lease ends in this range. Afterwards the lease says the same.
    after    timestamptz NOT NULL,
    until    timestamptz NOT NULL,
    -- Whether the relay died with them. Only then may a delivery have killed it.
    died     boolean     NOT NULL,
    PRIMARY KEY (instance, until)
);

COMMENT ON TABLE outbox_void IS 'Claims that no longer hold although their lease lasts: of relays that died or left, or claims whose acknowledgement was lost.';

-- Which database this is, so that a relay which wakes up on a copy of it sends nothing.
CREATE TABLE outbox_identity (
    only_row          boolean          PRIMARY KEY DEFAULT true,
    -- What PostgreSQL itself says. A dump that is restored has another oid or system; a copied data directory has neither.
    -- 0: the server does not tell.
    system_identifier bigint           NOT NULL,
    database_oid      bigint           NOT NULL,
    timeline          integer          NOT NULL,
    -- What relays are configured with. Empty: none of them names its environment.
    environment       text COLLATE "C" NOT NULL,
    addresses         text[]           NOT NULL,
    recorded_at       timestamptz      NOT NULL DEFAULT now(),
    CONSTRAINT outbox_identity_is_one_row CHECK (only_row),
    CONSTRAINT outbox_identity_environment_is_at_most_63_printable_ascii
        CHECK (octet_length(environment) <= 63 AND environment !~ '[^\x20-\x7e]')
);

COMMENT ON TABLE outbox_identity IS 'The database that relays last accepted as theirs. On any other they quarantine.';

-- A relay that sees a condition inserts (rule, subject) ON CONFLICT DO UPDATE SET count = count + 1; one that sees its end sets
-- resolved_at. The trigger below does the rest.
CREATE TABLE outbox_alert (
    rule           text COLLATE "C" NOT NULL,
    subject        text COLLATE "C" NOT NULL,
    opened_at      timestamptz      NOT NULL DEFAULT now(),
    last_at        timestamptz      NOT NULL DEFAULT now(),
    count          bigint           NOT NULL DEFAULT 1,
    first_event_id bigint,
    first_error    text,
    detail         text,
    -- How bad it was when the count last grew, in the unit of the rule.
    level          bigint           NOT NULL DEFAULT 0,
    -- What the count was when the present episode began.
    counted_before bigint           NOT NULL DEFAULT 0,
    notified_count bigint           NOT NULL DEFAULT 0,
    resolved_at    timestamptz,
    -- When the first channel was told of the recovery: what fires after that begins a new episode.
    recovered_at   timestamptz,
    -- When a relay should look at this row again; NULL: not before something happens to it.
    due_at         timestamptz      DEFAULT now(),
    PRIMARY KEY (rule, subject),
    CONSTRAINT outbox_alert_counts_are_sane CHECK (count > 0 AND notified_count BETWEEN 0 AND count)
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_alert IS 'Open alerts, one row per rule and subject, so that many relays send each once.';
COMMENT ON COLUMN outbox_alert.notified_count IS 'The highest count that any channel has been told.';
COMMENT ON COLUMN outbox_alert.resolved_at IS 'When what the alert is about ended; NULL while it lasts. The row goes some time after that has been told.';
COMMENT ON COLUMN outbox_alert.detail IS 'What it is about, in words; the latest state.';

-- +goose StatementBegin
CREATE FUNCTION outbox_alert_changed() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.resolved_at IS NULL AND OLD.resolved_at IS NOT NULL AND NEW.count = OLD.count THEN
        NEW.count := OLD.count + 1;
    END IF;
    IF NEW.count > OLD.count THEN
        NEW.resolved_at := NULL; -- it has fired again, whether or not the statement says so
        IF OLD.recovered_at IS NOT NULL THEN
            NEW.opened_at := now();
            NEW.counted_before := OLD.count;
            NEW.recovered_at := NULL;
        END IF;
        NEW.due_at := now();
    ELSIF NEW.resolved_at IS NOT NULL AND OLD.resolved_at IS NULL THEN
        NEW.due_at := now();
    END IF;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER outbox_alert_changed BEFORE UPDATE OF count, resolved_at ON outbox_alert
    FOR EACH ROW EXECUTE FUNCTION outbox_alert_changed();

CREATE TABLE outbox_alert_notice (
    rule            text COLLATE "C" NOT NULL,
    subject         text COLLATE "C" NOT NULL,
    channel         text             NOT NULL,
    -- The alert's count as this channel was told it last, and as it was when the channel was told of the recovery.
    count           bigint           NOT NULL DEFAULT 0,
    recovered_count bigint           NOT NULL DEFAULT 0,
    notified_at     timestamptz,
    -- The relay that sends holds the row until then; after a failure, when to try again.
    claimed_until   timestamptz,
    PRIMARY KEY (rule, subject, channel),
    FOREIGN KEY (rule, subject) REFERENCES outbox_alert ON DELETE CASCADE
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_alert_notice IS 'What each channel has been told of each open alert.';

CREATE TABLE outbox_watch (
    only_row   boolean     PRIMARY KEY DEFAULT true,
    watched_at timestamptz NOT NULL DEFAULT '-infinity',
    sample     jsonb       NOT NULL DEFAULT '{}',
    CONSTRAINT outbox_watch_is_one_row CHECK (only_row)
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_watch IS 'What a relay saw when it last looked around the database, for the others.';

INSERT INTO outbox_watch DEFAULT VALUES;

-- +goose Down
DROP TABLE outbox_watch;
DROP TABLE outbox_alert_notice;
DROP TABLE outbox_alert;
DROP FUNCTION outbox_alert_changed();
DROP TABLE outbox_identity;
DROP TABLE outbox_void;
DROP TABLE outbox_rescue;
DROP TABLE outbox_relay_route;
DROP TABLE outbox_relay_destination;
DROP TABLE outbox_relay;
