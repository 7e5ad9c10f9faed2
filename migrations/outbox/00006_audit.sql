-- What operators did: who, when, what and how much. Each row is written in the transaction of the change that it names.

-- +goose Up
CREATE TABLE outbox_audit (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz      NOT NULL DEFAULT now(),
    -- The last batch of a bulk operation. One that runs, and has not grown for a while, was killed.
    updated_at  timestamptz      NOT NULL DEFAULT now(),
    event_id    bigint,
    matched     bigint           NOT NULL DEFAULT 0,
    done        bigint           NOT NULL DEFAULT 0,
    actor       text             NOT NULL,
    origin      text COLLATE "C" NOT NULL,
    action      text COLLATE "C" NOT NULL,
    state       text COLLATE "C" NOT NULL DEFAULT 'done',
    destination text COLLATE "C",
    selection   jsonb,
    detail      text,
    CONSTRAINT outbox_audit_columns_are_sane CHECK (
        origin IN ('cli', 'api', 'page') AND state IN ('running', 'done', 'interrupted', 'failed') AND matched >= 0 AND done >= 0)
);

COMMENT ON TABLE outbox_audit IS 'What operators changed or revealed; never a payload. Nothing removes its rows.';
COMMENT ON COLUMN outbox_audit.actor IS 'Who: user@host of a command, the login of the API or the page; without either the database user.';
COMMENT ON COLUMN outbox_audit.selection IS 'What a bulk operation was to change, so that another process can continue it.';
COMMENT ON COLUMN outbox_audit.matched IS 'How many deliveries the preview counted; 0: there was none.';
COMMENT ON COLUMN outbox_audit.done IS 'How many deliveries were changed so far.';

-- The audit is kept as it was written, also from the login of a relay, which carries bulk operations on.
-- +goose StatementBegin
CREATE FUNCTION outbox_keep_audit() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF OLD.state = 'done' -- which nothing goes on with
       OR OLD.state <> 'running' AND (NEW.state <> 'running' OR NEW.done <> OLD.done) -- an operation that ended can go on, and changes nothing before
       OR NEW.done < OLD.done OR NEW.updated_at < OLD.updated_at
       OR (NEW.id, NEW.at, NEW.actor, NEW.origin, NEW.action, NEW.destination, NEW.event_id, NEW.selection, NEW.matched)
          IS DISTINCT FROM (OLD.id, OLD.at, OLD.actor, OLD.origin, OLD.action, OLD.destination, OLD.event_id, OLD.selection, OLD.matched) THEN
        RAISE EXCEPTION 'outbox_audit: entry % is kept as it was written', OLD.id
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER outbox_audit_is_kept BEFORE UPDATE ON outbox_audit FOR EACH ROW EXECUTE FUNCTION outbox_keep_audit();

-- Payloads and headers are for relays, and for those who may reveal them: a reader learns how large a payload is and which headers there
-- are, and revealing is in the audit before it happens. Names are found as in outbox_wake (00001_event.sql).
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace($sql$

-- What readers may know of an event's content.
CREATE FUNCTION {schema}.outbox_outline(event bigint, OUT payload_bytes integer, OUT header_names text[])
RETURNS SETOF record LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT octet_length(e.payload::text), ARRAY (SELECT jsonb_object_keys(e.headers) ORDER BY 1)
    FROM (SELECT o.payload, o.headers FROM {schema}.outbox o WHERE o.id = event
          UNION ALL SELECT a.payload, a.headers FROM {schema}.outbox_archive a WHERE a.id = event LIMIT 1) e
$$;

-- Writes into the audit that somebody is about to see an event's content. Commit before outbox_reveal.
CREATE FUNCTION {schema}.outbox_order_reveal(event bigint, actor text, origin text) RETURNS bigint LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO {schema}.outbox_audit (actor, origin, action, event_id, detail)
    VALUES (coalesce(nullif(actor, ''), session_user::text), origin, 'reveal_payload', event, 'login ' || session_user::text)
    RETURNING id
$$;

-- Returns the content of the event of an entry that outbox_order_reveal wrote within the last minute, in an earlier transaction: what
-- is undone reveals nothing. now() is that of the transaction, as is the default of the column.
CREATE FUNCTION {schema}.outbox_reveal(entry bigint, OUT payload text, OUT headers jsonb)
RETURNS SETOF record LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT e.payload::text, e.headers
    FROM {schema}.outbox_audit t CROSS JOIN LATERAL (
        SELECT o.payload, o.headers FROM {schema}.outbox o WHERE o.id = t.event_id
        UNION ALL SELECT a.payload, a.headers FROM {schema}.outbox_archive a WHERE a.id = t.event_id LIMIT 1) e
    WHERE t.id = entry AND t.action = 'reveal_payload' AND t.detail = 'login ' || session_user::text
      AND t.at < now() AND t.at > now() - interval '1 minute'
$$;

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_outline(bigint), outbox_order_reveal(bigint, text, text), outbox_reveal(bigint) FROM PUBLIC;

-- +goose Down
DROP FUNCTION outbox_reveal(bigint);
DROP FUNCTION outbox_order_reveal(bigint, text, text);
DROP FUNCTION outbox_outline(bigint);
DROP TABLE outbox_audit;
DROP FUNCTION outbox_keep_audit();
