-- Payloads and headers are for relays, and for those who may reveal them. A producer learns whether an event is a duplicate without
-- the right to read events, a reader how large a payload is and which headers there are, and revealing is in the audit before it happens.

-- +goose Up
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace($sql$

-- Compares events with what is stored under their keys, for Enqueue of package outbox. written_by tells rows apart by their writer:
-- those of this transaction (whose ids, those of its savepoints included, it holds locked), the newest of them written by its last
-- command, and those of others (-1).
CREATE FUNCTION {schema}.outbox_compare_events(types text[], versions integer[], payloads json[], keys text[], orderings text[], related text[], header_sets jsonb[],
    OUT number bigint, OUT found boolean, OUT written_by bigint, OUT differs text)
RETURNS SETOF record LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT e.number - 1, o.id IS NOT NULL,
           CASE WHEN o.xmin IN (SELECT transactionid FROM pg_locks WHERE locktype = 'transactionid' AND pid = pg_backend_pid())
                THEN o.cmin::text::bigint ELSE -1 END,
           concat_ws(',', CASE WHEN o.event_type <> e.event_type THEN 'Type' END,
                          CASE WHEN o.event_version <> e.event_version THEN 'Version' END,
                          CASE WHEN o.payload::text <> e.payload::text THEN 'Payload' END,
                          CASE WHEN o.ordering_key IS DISTINCT FROM e.ordering_key THEN 'OrderingKey' END,
                          CASE WHEN o.related_reference IS DISTINCT FROM e.related_reference THEN 'RelatedReference' END,
                          CASE WHEN (SELECT jsonb_object_agg(key, value) FROM jsonb_each(o.headers)
                                     WHERE lower(key) NOT IN ('traceparent', 'tracestate', 'baggage'))
                                    IS DISTINCT FROM
                                    (SELECT jsonb_object_agg(key, value) FROM jsonb_each(e.headers)
                                     WHERE lower(key) NOT IN ('traceparent', 'tracestate', 'baggage'))
                               THEN 'Headers' END)
    FROM unnest(types, versions, payloads, keys, orderings, related, header_sets) WITH ORDINALITY
         AS e (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, number)
    LEFT JOIN {schema}.outbox o ON o.idempotency_key = e.idempotency_key
    ORDER BY e.number
$$;

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
REVOKE ALL ON FUNCTION outbox_compare_events(text[], integer[], json[], text[], text[], text[], jsonb[]), outbox_outline(bigint),
    outbox_order_reveal(bigint, text, text), outbox_reveal(bigint) FROM PUBLIC;

-- +goose Down
DROP FUNCTION outbox_reveal(bigint);
DROP FUNCTION outbox_order_reveal(bigint, text, text);
DROP FUNCTION outbox_outline(bigint);
DROP FUNCTION outbox_compare_events(text[], integer[], json[], text[], text[], text[], jsonb[]);
