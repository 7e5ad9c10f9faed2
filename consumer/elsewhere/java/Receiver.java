// A receiver for outbox-relay with the JDK's own server and pgjdbc, on Java 17 or newer. Every event takes effect once.
// docs/receiving-elsewhere.md explains it. To use it, copy it and write handle.

import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.sql.*;
import java.time.Instant;
import java.util.*;
import java.util.concurrent.Executors;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import javax.sql.DataSource;
import org.postgresql.ds.PGSimpleDataSource;

public final class Receiver {
    static final String RECEIVER = "shipping"; // unique among the receivers that share a database
    static final String SOURCE = "finance"; // the sender; keys of two senders are independent
    static final int TOLERANCE_SECONDS = 300;
    static final int MAX_BODY_BYTES = 1 << 20;
    static final List<byte[]> SECRETS = parseSecrets(System.getenv("FINANCE_SECRET")); // several while they rotate, separated by commas
    static final List<byte[]> QUESTION_SECRETS = SECRETS.stream().map(secret -> {
        try {
            return hmac(secret, "outbox-relay reconcile".getBytes(StandardCharsets.US_ASCII));
        } catch (GeneralSecurityException e) {
            throw new IllegalStateException(e);
        }
    }).toList();
    // A query for the key of each effect, such as SELECT event_key FROM shipments, if the table has the event's key. ?? stands for ?.
    static final String EFFECTS = System.getenv("EFFECTS");

    // handle is the effect of an event. It writes through db, in the transaction that also remembers the event, and neither
    // commits nor rolls back. After any exception everything is rolled back; a Problem decides the answer.
    static void handle(Connection db, Event event, byte[] body) throws SQLException {
        if (!event.type().equals("invoice.created")) {
            throw new Problem(422, "event-unknown", "This receiver has no handler for this type of event.");
        }
        try (PreparedStatement insert = db.prepareStatement(
                "INSERT INTO shipments (invoice, total) SELECT invoice, total FROM json_to_record(?::json) AS p (invoice text, total numeric)")) {
            insert.setString(1, new String(body, StandardCharsets.UTF_8));
            insert.executeUpdate();
        } catch (SQLException e) {
            String state = Objects.toString(e.getSQLState(), "");
            if (state.startsWith("22") || state.equals("23502")) { // not JSON, or not of an invoice
                throw new Problem(422, "permanent-failure", "The payload is not an invoice.");
            }
            throw e;
        }
    }

    // An earlier handler may have changed this connection: a search_path would hide the memory of events. lock_timeout bounds
    // the wait for another transaction that has the event. The idle timeout ends a handler that hangs. A sender never repeats
    // what was answered, so the commit must reach the disk.
    static final String BEGIN = """
        RESET ALL; RESET ROLE; DISCARD TEMP; SELECT pg_advisory_unlock_all();
        SET LOCAL lock_timeout = '100ms';
        SET LOCAL idle_in_transaction_session_timeout = '60s';
        SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'""";

    // ADMIT inserts the event's row. Without a row in return the event is known, or another transaction has it.
    static final String ADMIT = """
        INSERT INTO processed_events (receiver, source, idempotency_key, payload_hash, destination, event_type, event_version,
            related_reference, event_id, not_after, processing_state, processed_at, response_status)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?::bigint, ?::timestamptz, 'succeeded', now(), 204)
        ON CONFLICT DO NOTHING
        RETURNING coalesce(not_after < now() - interval '5 minutes', false) OR EXISTS (
            SELECT FROM inbox_forgotten f
            WHERE f.receiver = ? AND f.source = ? AND f.received_before > ?::timestamptz - interval '5 minutes'),
            pg_current_xact_id()::text""";

    static final String RECALL = """
        SELECT destination <> ?, payload_hash <> ?, coalesce(response_status, 200)
        FROM processed_events WHERE receiver = ? AND source = ? AND idempotency_key = ?""";

    // EXTEND records that the sender may repeat the event for longer than it said before, as after a replay.
    static final String EXTEND = """
        UPDATE processed_events SET not_after = ?::timestamptz
        WHERE receiver = ? AND source = ? AND idempotency_key = ? AND coalesce(not_after, '-infinity') < ?::timestamptz""";

    // UNENDED returns a row if the transaction is still the one that inserted the event. It fails after an error that the
    // handler did not pass on. Without it COMMIT would then roll back.
    static final String UNENDED = "SELECT 1 WHERE pg_current_xact_id_if_assigned()::text = ?";

    // ENDED marks an event whose handler has committed by itself: what that left out is unknown, so that its duplicates are
    // refused.
    static final String ENDED = """
        UPDATE processed_events
        SET processing_state = 'failed', processed_at = now(), response_status = 422, last_error = 'the handler ended the transaction'
        WHERE receiver = ? AND source = ? AND idempotency_key = ? AND processing_state = 'succeeded'
        AND pg_xact_status(?::xid8) = 'committed'""";

    record Answer(int status, boolean replayed) {}

    // once lets the event take effect unless it has, and returns the status to answer.
    static Answer once(DataSource pool, Event event, byte[] body) throws Exception {
        byte[] hash = MessageDigest.getInstance("SHA-256").digest(body);
        Problem failure = new Problem(503, "database-unavailable", "Nothing was changed. Send the request again later.");
        try (Connection db = pool.getConnection()) {
            Object xact = null;
            try {
                db.setAutoCommit(false);
                execute(db, BEGIN);
                List<Object> admitted = query(db, ADMIT, RECEIVER, SOURCE, event.idempotencyKey(), hash, event.destination(), event.type(), event.version(),
                    event.reference(), event.id(), event.notAfter(), RECEIVER, SOURCE, event.createdAt());
                if (admitted == null) return recall(db, event, hash);
                if ((boolean) admitted.get(0)) {
                    throw new Problem(422, "forgotten", "The event may have been processed and forgotten. Nothing was changed.");
                }
                execute(db, "SET LOCAL lock_timeout TO DEFAULT");
                failure = new Problem(500, "handler-failed", "Everything was rolled back. The receiver's log has the cause.");
                xact = admitted.get(1);
                handle(db, event, body);
                failure = new Problem(500, "commit-failed", "The commit failed or its result is unknown. Send the request again.");
                if (query(db, UNENDED, xact) == null) throw handlerEnded();
                xact = null;
                db.commit();
                return new Answer(204, false);
            } catch (Throwable e) {
                boolean ended = false;
                try {
                    ended = giveUp(db, event, xact);
                } catch (SQLException lost) {
                    e.addSuppressed(lost);
                }
                if (!ended) throw e;
                System.err.println("event " + event.idempotencyKey() + ": the handler committed by itself");
                throw handlerEnded();
            }
        } catch (Problem e) {
            throw e;
        } catch (Exception e) {
            String state = e instanceof SQLException s ? Objects.toString(s.getSQLState(), "") : "";
            if (state.equals("55P03") && failure.status == 503) throw inFlight();
            System.err.println("event " + event.idempotencyKey() + ": " + e);
            if (state.equals("40001") || state.equals("40P01")) {
                throw new Problem(503, "serialization-failure", "Nothing was changed. Send the request again.");
            }
            throw failure;
        }
    }

    // giveUp rolls back, and reports whether the handler had committed by itself before.
    static boolean giveUp(Connection db, Event event, Object xact) throws SQLException {
        db.rollback();
        if (xact == null) return false;
        execute(db, BEGIN);
        try (PreparedStatement mark = prepare(db, ENDED, RECEIVER, SOURCE, event.idempotencyKey(), xact)) {
            int ended = mark.executeUpdate();
            db.commit();
            return ended == 1;
        }
    }

    static Problem handlerEnded() {
        return new Problem(500, "handler-ended-transaction", "The handler must neither commit nor roll back.");
    }

    // recall answers for an event that was not admitted.
    static Answer recall(Connection db, Event event, byte[] hash) throws SQLException {
        List<Object> known = query(db, RECALL, event.destination(), hash, RECEIVER, SOURCE, event.idempotencyKey());
        if (known == null) throw inFlight();
        if (Boolean.TRUE.equals(known.get(0))) {
            throw new Problem(421, "other-destination", "Two destinations lead to one receiver: give each its own name.");
        }
        if (Boolean.TRUE.equals(known.get(1))) {
            throw new Problem(422, "key-reused", "The key was processed with another body. Send new content under a new key.");
        }
        try (PreparedStatement extend = prepare(db, EXTEND, event.notAfter(), RECEIVER, SOURCE, event.idempotencyKey(), event.notAfter())) {
            extend.executeUpdate();
        }
        db.commit();
        return new Answer(((Number) known.get(2)).intValue(), true);
    }

    static Problem inFlight() {
        return new Problem(409, "in-flight", "The same event is being processed. Send it again later.");
    }

    // What `outbox-relay reconcile` asks, and how PostgreSQL answers. The question is a parameter, as the JSON that it came as.
    static final String QUESTION = """

        FROM (SELECT ?::text AS receiver, ?::text AS source, ?::boolean AS counts_effects, ?::json AS json) s,
          json_to_record(s.json) AS q (ask text, since timestamptz, until timestamptz, salt text, bounds text[], page bigint, after text,
            keys text[], "limit" integer)""";

    static final String CHECK = """
        SELECT q.ask, CASE
            WHEN EXISTS (SELECT FROM json_object_keys(s.json) k
                WHERE k NOT IN ('ask', 'since', 'until', 'salt', 'bounds', 'page', 'after', 'keys', 'limit'))
              OR (q.ask IN ('describe', 'digest', 'list', 'find', 'unfinished', 'doubled', 'missing')) IS NOT TRUE
            THEN 'It asks for what this version does not know.'
            WHEN q.ask = 'digest' AND octet_length(decode(q.salt, 'base64')) IS DISTINCT FROM 16 THEN 'salt has not 16 bytes.'
            WHEN cardinality(q.bounds) > 8191 OR (SELECT sum(octet_length(b)) FROM unnest(q.bounds) b) > 491520
            THEN 'bounds has more than 8191 keys or 491520 bytes.'
            WHEN EXISTS (SELECT FROM (SELECT b, lag(b) OVER (ORDER BY n) AS before FROM unnest(q.bounds) WITH ORDINALITY u (b, n)) o
                WHERE o.b <= o.before COLLATE "C")
            THEN 'bounds does not ascend.'
            WHEN q.page < 0 THEN 'page is below 0.'
            WHEN cardinality(q.keys) > 1000 OR (SELECT max(octet_length(k)) FROM unnest(q.keys || q.after) k) > 1024
            THEN 'There are more than 1000 keys, or one of more than 1024 bytes.'
            WHEN q.ask IN ('list', 'unfinished', 'doubled', 'missing') AND coalesce(q."limit", 0) NOT BETWEEN 1 AND 1000
            THEN 'limit is not 1 to 1000.'
          END AS problem""";

    // A digest reads 2,048 pages of 8 KiB in their order, since that of the keys would read the table at random; the next question
    // continues. A range ends with its bound, and sums are modulo 2^64. EFFECTS stands for the query.
    static final Map<String, String> ANSWERS = Map.of(
        "describe", """
            'now', clock_timestamp(),
            'remembers_since', (SELECT f.received_before FROM inbox_forgotten f WHERE f.receiver = s.receiver AND f.source = s.source)""",
        "digest", """
            'next', coalesce(q.page, 0) + 2048,
            'pages', pg_relation_size('processed_events'::regclass) / current_setting('block_size')::bigint,
            'ranges', (SELECT json_agg(json_build_object('r', d.r, 'n', d.n, 's', mod(mod(d.s, 18446744073709551616) + 18446744073709551616, 18446744073709551616)::text))
              FROM (SELECT c.r, count(c.hash) AS n, sum(c.hash) AS s
                FROM (SELECT k.hash, count(*) FILTER (WHERE k.hash IS NULL) OVER (ORDER BY k.key COLLATE "C", k.hash IS NULL ROWS UNBOUNDED PRECEDING) AS r
                  FROM (SELECT p.idempotency_key AS key,
                      ('x' || encode(substr(sha256(decode(q.salt, 'base64') || convert_to(p.idempotency_key, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint AS hash
                    FROM processed_events p
                    WHERE p.ctid >= ('(' || least(coalesce(q.page, 0), 4294967295) || ',0)')::tid
                      AND p.ctid < ('(' || least(coalesce(q.page, 0) + 2048, 4294967295) || ',0)')::tid
                      AND p.receiver = s.receiver AND p.source = s.source
                      AND p.received_at >= coalesce(q.since, '-infinity') AND p.received_at < coalesce(q.until, 'infinity')
                    UNION ALL SELECT b, NULL FROM unnest(q.bounds) b) k) c
                GROUP BY c.r HAVING count(c.hash) > 0) d),
            'held', (SELECT json_agg(h) FROM (
                SELECT p.idempotency_key AS key, p.received_at, 'failed' AS state FROM processed_events p
                WHERE p.ctid >= ('(' || least(coalesce(q.page, 0), 4294967295) || ',0)')::tid
                  AND p.ctid < ('(' || least(coalesce(q.page, 0) + 2048, 4294967295) || ',0)')::tid
                  AND p.receiver = s.receiver AND p.source = s.source AND p.processing_state NOT IN ('succeeded', 'ignored', 'recorded')
                  AND p.received_at >= coalesce(q.since, '-infinity') AND p.received_at < coalesce(q.until, 'infinity')
                LIMIT 1000) h)""",
        "list", """
            'held', (SELECT json_agg(h) FROM (
                SELECT p.idempotency_key AS key, p.received_at, p.processing_state AS state FROM processed_events p
                WHERE p.receiver = s.receiver AND p.source = s.source AND p.idempotency_key > coalesce(q.after, '')
                ORDER BY p.idempotency_key LIMIT q."limit") h)""",
        "find", """
            'held', (SELECT json_agg(h) FROM (
                SELECT p.idempotency_key AS key, p.received_at, coalesce(p.event_id, 0)::text AS event_id,
                  CASE WHEN p.processing_state <> 'recorded' THEN p.processing_state ELSE coalesce((SELECT i.processing_state FROM inbox_events i
                    WHERE i.receiver = p.receiver AND i.source = p.source AND i.idempotency_key = p.idempotency_key), 'succeeded') END AS state
                FROM processed_events p
                WHERE p.receiver = s.receiver AND p.source = s.source AND p.idempotency_key = ANY (q.keys) ORDER BY p.idempotency_key) h)""",
        "unfinished", """
            'held', (SELECT json_agg(h) FROM (
                SELECT i.idempotency_key AS key, i.received_at, i.processing_state AS state FROM inbox_events i
                WHERE i.receiver = s.receiver AND i.source = s.source AND i.processing_state IN ('failed', 'processing', 'pending')
                  AND i.received_at >= coalesce(q.since, '-infinity') AND i.received_at < coalesce(q.until, 'infinity')
                ORDER BY i.idempotency_key LIMIT q."limit") h)""",
        "doubled", """
            'held', (SELECT json_agg(h) FROM (
                SELECT t.key, t.effects FROM (SELECT e.key::text COLLATE "C" AS key, count(*) AS effects FROM (
EFFECTS
                  ) AS e (key) WHERE e.key IS NOT NULL GROUP BY 1 HAVING count(*) > 1) t
                WHERE (q.keys IS NULL OR t.key = ANY (q.keys))
                  AND (SELECT p.received_at >= coalesce(q.since, '-infinity') AND p.received_at < coalesce(q.until, 'infinity') FROM processed_events p
                    WHERE p.receiver = s.receiver AND p.source = s.source AND p.idempotency_key = t.key)
                ORDER BY t.key LIMIT q."limit") h)""",
        "missing", """
            'held', (SELECT json_agg(h) FROM (
                SELECT p.idempotency_key AS key, p.received_at, 'succeeded' AS state FROM processed_events p
                WHERE s.counts_effects AND p.receiver = s.receiver AND p.source = s.source
                  AND p.received_at >= coalesce(q.since, '-infinity') AND p.received_at < coalesce(q.until, 'infinity')
                  AND (q.keys IS NULL OR p.idempotency_key = ANY (q.keys))
                  AND (p.processing_state = 'succeeded' OR p.processing_state = 'recorded' AND EXISTS (SELECT FROM inbox_events i
                    WHERE i.receiver = p.receiver AND i.source = p.source AND i.idempotency_key = p.idempotency_key AND i.processing_state = 'succeeded'))
                  AND NOT EXISTS (SELECT FROM (
EFFECTS
                  ) AS e (key) WHERE e.key::text COLLATE "C" = p.idempotency_key)
                ORDER BY p.idempotency_key LIMIT q."limit") h)""");

    // Nested loops would read all effects for each event where no index has their keys.
    static final String READ = """
        RESET ALL; RESET ROLE;
        SET TRANSACTION READ ONLY;
        SET LOCAL statement_timeout = '30s';
        SET LOCAL lock_timeout = '2s';
        SET LOCAL jit = off;
        SET LOCAL work_mem = '32MB';
        SET LOCAL enable_nestloop = off""";

    static final int ASKED_SECONDS = 2 * TOLERANCE_SECONDS + 1; // for which a question could be sent again
    static final int MAX_ASKED = 10_000;
    static final Map<String, Long> ASKED = new HashMap<>(); // until when a question could be sent again, by its key
    static final Semaphore ANSWERING = new Semaphore(1);

    // reconcile answers a question of `outbox-relay reconcile`: which events there are, and nothing of their content. One is
    // answered at a time, and each once. Neither events nor questions can be sent in the other's place, as questions have other
    // secrets.
    static byte[] reconcile(DataSource pool, SortedMap<String, List<String>> header, byte[] body) throws GeneralSecurityException {
        verify(QUESTION_SECRETS, header, body);
        remember(header.get("x-idempotency-key").get(0));
        if (!ANSWERING.tryAcquire()) throw busy();
        try (Connection db = pool.getConnection()) {
            db.setAutoCommit(false);
            try {
                execute(db, READ);
                return answer(db, new String(body, StandardCharsets.UTF_8)).getBytes(StandardCharsets.UTF_8);
            } finally {
                db.rollback();
            }
        } catch (SQLException e) {
            System.err.println("question: " + e);
            throw new Problem(503, "database-unavailable", "Nothing was changed. Send the request again later.");
        } finally {
            ANSWERING.release();
        }
    }

    static String answer(Connection db, String question) throws SQLException {
        Object[] values = {RECEIVER, SOURCE, EFFECTS != null, question};
        List<Object> checked;
        try {
            checked = query(db, CHECK + QUESTION, values);
        } catch (SQLException e) {
            if (!Objects.toString(e.getSQLState(), "").startsWith("22")) throw e;
            throw new Problem(400, "question-invalid", "It is not the JSON of a question.");
        }
        if (checked.get(1) != null) throw new Problem(400, "question-invalid", (String) checked.get(1));
        if (ANSWERS.get(checked.get(0)).contains("EFFECTS")) execute(db, "SET LOCAL statement_timeout = '300s'");
        String part = ANSWERS.get(checked.get(0)).replace("EFFECTS", Objects.requireNonNullElse(EFFECTS, "SELECT NULL WHERE false"));
        return (String) query(db, "SELECT json_build_object('receiver', s.receiver, 'source', s.source, 'counts_effects', s.counts_effects, "
            + part + ")::text" + QUESTION, values).get(0);
    }

    static synchronized void remember(String key) {
        long now = Instant.now().getEpochSecond();
        if (ASKED.size() >= MAX_ASKED) ASKED.values().removeIf(until -> until < now);
        if (ASKED.getOrDefault(key, 0L) >= now) {
            throw new Problem(409, "question-repeated", "Each question has its own key, and is answered once.");
        }
        if (ASKED.size() >= MAX_ASKED) throw busy();
        ASKED.put(key, now + ASKED_SECONDS);
    }

    static Problem busy() {
        return new Problem(503, "receiver-busy", "Nothing was tried. Send the request again.");
    }

    // Problem is a refusal as docs/wire.md lists it.
    static final class Problem extends RuntimeException {
        final int status;
        final String name;

        Problem(int status, String name, String detail) {
            super(detail);
            this.status = status;
            this.name = name;
        }
    }

    // TITLES are those of Go receivers, by the names of refusals. A handler's own name has OTHER_TITLE.
    static final String OTHER_TITLE = "The receiver refused the event";
    static final Map<String, String> TITLES = Map.ofEntries(
        Map.entry("key-missing", "The request has no idempotency key"),
        Map.entry("key-repeated", "The request names its key more than once"),
        Map.entry("header-invalid", "A header about the event is malformed"),
        Map.entry("signature-invalid", "The request's signature is not valid"),
        Map.entry("timestamp-out-of-tolerance", "The request is not recent"),
        Map.entry("body-unreadable", "The body did not arrive whole"),
        Map.entry("body-too-large", "The body is too large"),
        Map.entry("database-unavailable", "The receiver's database did not take the request"),
        Map.entry("serialization-failure", "A concurrent transaction was in the way"),
        Map.entry("in-flight", "The same event is being processed"),
        Map.entry("other-destination", "The event is known from another destination"),
        Map.entry("key-reused", "The idempotency key was used for another body"),
        Map.entry("forgotten", "The event may have been processed and forgotten"),
        Map.entry("event-unknown", "No handler takes the event"),
        Map.entry("permanent-failure", "The handler refused the event for good"),
        Map.entry("handler-failed", "The handler did not succeed"),
        Map.entry("handler-ended-transaction", "The handler ended the middleware's transaction"),
        Map.entry("commit-failed", "The handler's work was not committed"),
        Map.entry("method-not-allowed", "Questions are sent by POST"),
        Map.entry("question-invalid", "The question is malformed"),
        Map.entry("question-repeated", "The question was asked before"),
        Map.entry("receiver-busy", "The receiver reads too many requests at once"));

    // precheck refuses what no body can make valid, before the body is read.
    static void precheck(SortedMap<String, List<String>> header) {
        List<String> keys = header.getOrDefault("x-idempotency-key", List.of());
        if (keys.isEmpty()) throw new Problem(400, "key-missing", "The request has no X-Idempotency-Key.");
        if (keys.size() > 1) throw new Problem(400, "key-repeated", "The request has more than one X-Idempotency-Key.");
        for (String name : List.of("webhook-id", "webhook-timestamp", "webhook-signature")) {
            if (header.getOrDefault(name, List.of()).size() != 1) {
                throw new Problem(401, "signature-invalid", name + " is missing or repeated.");
            }
        }
        String timestamp = header.get("webhook-timestamp").get(0);
        if (!timestamp.matches("[0-9]{1,15}")) throw new Problem(401, "signature-invalid", "webhook-timestamp is not a number.");
        if (Math.abs(Instant.now().getEpochSecond() - Long.parseLong(timestamp)) > TOLERANCE_SECONDS) {
            throw new Problem(401, "timestamp-out-of-tolerance", "Compare the clocks of the two machines.");
        }
    }

    // COVERED are the names of the headers that x1 covers.
    static final Pattern COVERED = Pattern.compile("x-idempotency-key|(x-outbox-|x-event-|ce-).*");

    // verify refuses a request without a valid x1 signature, which covers these headers and the body.
    static void verify(List<byte[]> secrets, SortedMap<String, List<String>> header, byte[] body) throws GeneralSecurityException {
        StringBuilder text = new StringBuilder("x1\n" + header.get("webhook-id").get(0) + "\n" + header.get("webhook-timestamp").get(0) + "\n");
        header.forEach((name, values) -> {
            if (COVERED.matcher(name).matches()) {
                values.forEach(value -> text.append(name).append(':').append(value).append('\n'));
            }
        });
        text.append('\n');
        for (byte[] secret : secrets) {
            byte[] mac = hmac(secret, text.toString().getBytes(StandardCharsets.ISO_8859_1), body);
            byte[] wanted = ("x1," + Base64.getEncoder().encodeToString(mac)).getBytes(StandardCharsets.ISO_8859_1);
            for (String entry : header.get("webhook-signature").get(0).split(" ")) {
                if (MessageDigest.isEqual(entry.getBytes(StandardCharsets.ISO_8859_1), wanted)) return; // takes constant time
            }
        }
        throw new Problem(401, "signature-invalid", "No x1 signature matches: the secret differs, or the request was changed.");
    }

    static byte[] hmac(byte[] secret, byte[]... parts) throws GeneralSecurityException {
        Mac mac = Mac.getInstance("HmacSHA256");
        mac.init(new SecretKeySpec(secret, "HmacSHA256"));
        for (byte[] part : parts) mac.update(part);
        return mac.doFinal();
    }

    record Event(String idempotencyKey, String type, int version, String id, String createdAt, String notAfter, String reference, String destination) {
        static final String TEXT = "[ -~]{1,255}";
        static final String TIME = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,}(Z|[+-][0-9:]{5})";

        // of reads the verified headers.
        static Event of(SortedMap<String, List<String>> header) {
            String version = read(header, "x-outbox-event-version", "[0-9]{1,9}", true);
            return new Event(read(header, "x-idempotency-key", TEXT, false), read(header, "x-outbox-event-type", TEXT, false),
                version == null ? 1 : Integer.parseInt(version), read(header, "x-outbox-event-id", "[0-9]{1,18}", true),
                read(header, "x-outbox-created-at", TIME, false), read(header, "x-outbox-not-after", TIME, true),
                read(header, "x-outbox-related-reference", TEXT, true), read(header, "x-outbox-destination", TEXT, true));
        }

        static String read(SortedMap<String, List<String>> header, String name, String pattern, boolean optional) {
            List<String> values = header.getOrDefault(name, List.of());
            if (values.isEmpty() && optional) return null;
            if (values.size() != 1 || !values.get(0).matches(pattern)) throw new Problem(400, "header-invalid", name + " is malformed.");
            return values.get(0);
        }
    }

    static List<byte[]> parseSecrets(String list) {
        return Arrays.stream(list.split(",")).map(text -> {
            byte[] key = Base64.getDecoder().decode(text.strip().replaceFirst("^whsec_", ""));
            if (key.length < 24 || key.length > 64) throw new IllegalArgumentException("FINANCE_SECRET: want whsec_ and 24 to 64 bytes in base64");
            return key;
        }).toList();
    }

    static void execute(Connection db, String script) throws SQLException {
        try (Statement statement = db.createStatement()) {
            statement.execute(script);
        }
    }

    static PreparedStatement prepare(Connection db, String sql, Object... values) throws SQLException {
        PreparedStatement statement = db.prepareStatement(sql);
        for (int i = 0; i < values.length; i++) statement.setObject(i + 1, values[i]);
        return statement;
    }

    // query returns the first row, or null.
    static List<Object> query(Connection db, String sql, Object... values) throws SQLException {
        try (PreparedStatement statement = prepare(db, sql, values); ResultSet rows = statement.executeQuery()) {
            if (!rows.next()) return null;
            List<Object> row = new ArrayList<>();
            for (int i = 1; i <= rows.getMetaData().getColumnCount(); i++) row.add(rows.getObject(i));
            return row;
        }
    }

    static void serve(DataSource pool, Semaphore connections, boolean question, HttpExchange exchange) throws IOException {
        try (exchange) {
            SortedMap<String, List<String>> header = new TreeMap<>();
            exchange.getRequestHeaders().forEach((name, values) -> header.put(name.toLowerCase(Locale.ROOT),
                values.stream().map(value -> value.replaceAll("^[ \t]+|[ \t]+$", "")).toList()));
            try {
                if (!exchange.getRequestMethod().equals("POST")) {
                    throw new Problem(405, "method-not-allowed", "outbox-relay sends events and questions by POST.");
                }
                precheck(header);
                byte[] body = read(exchange);
                if (question) {
                    body = reconcile(pool, header, body);
                    exchange.getResponseHeaders().set("Content-Type", "application/json");
                    exchange.getResponseHeaders().set("Cache-Control", "no-store");
                    exchange.sendResponseHeaders(200, body.length);
                    exchange.getResponseBody().write(body);
                    return;
                }
                verify(SECRETS, header, body);
                Event event = Event.of(header);
                if (!connections.tryAcquire(5, TimeUnit.SECONDS)) throw busy();
                Answer answer;
                try {
                    answer = once(pool, event, body);
                } finally {
                    connections.release();
                }
                if (answer.replayed()) exchange.getResponseHeaders().set("Idempotency-Replayed", "true");
                exchange.sendResponseHeaders(answer.status(), -1);
            } catch (Problem problem) {
                refuse(exchange, problem);
            } catch (IOException e) {
                throw e;
            } catch (Exception e) {
                e.printStackTrace();
                refuse(exchange, new Problem(500, "handler-failed", "The receiver's log has the cause."));
            }
        }
    }

    static byte[] read(HttpExchange exchange) {
        try {
            byte[] body = exchange.getRequestBody().readNBytes(MAX_BODY_BYTES + 1);
            if (body.length <= MAX_BODY_BYTES) return body;
        } catch (IOException e) {
            throw new Problem(408, "body-unreadable", "The body did not arrive whole.");
        }
        throw new Problem(413, "body-too-large", "At most " + MAX_BODY_BYTES + " bytes are accepted.");
    }

    // No text of a problem needs to be escaped in JSON.
    static void refuse(HttpExchange exchange, Problem problem) throws IOException {
        byte[] body = String.format("{\"type\":\"urn:outbox-relay:problem:%s\",\"title\":\"%s\",\"status\":%d,\"detail\":\"%s\"}",
            problem.name, TITLES.getOrDefault(problem.name, OTHER_TITLE), problem.status, problem.getMessage()).getBytes(StandardCharsets.UTF_8);
        exchange.getResponseHeaders().set("Content-Type", "application/problem+json");
        if (problem.status == 409 || problem.status == 503) exchange.getResponseHeaders().set("Retry-After", "1");
        exchange.sendResponseHeaders(problem.status, body.length);
        exchange.getResponseBody().write(body);
    }

    public static void main(String[] args) throws IOException {
        // The server closes a connection whose request has not arrived whole in that many seconds.
        System.setProperty("sun.net.httpserver.maxReqTime", Objects.requireNonNullElse(System.getenv("BODY_SECONDS"), "10"));
        System.setProperty("sun.net.httpserver.nodelay", "true");
        PGSimpleDataSource pool = new PGSimpleDataSource(); // opens a connection for every event; put a pool such as HikariCP in its place
        pool.setUrl(System.getenv("DATABASE_URL")); // jdbc:postgresql://…
        Semaphore connections = new Semaphore(10);
        HttpServer server = HttpServer.create(new InetSocketAddress(Objects.requireNonNullElse(System.getenv("HOST"), "127.0.0.1"), Integer.parseInt(Objects.requireNonNullElse(System.getenv("PORT"), "8080"))), 128);
        server.createContext("/webhooks/finance", exchange -> serve(pool, connections, false, exchange));
        server.createContext("/webhooks/finance/reconcile", exchange -> serve(pool, connections, true, exchange));
        server.setExecutor(Executors.newFixedThreadPool(100));
        server.start();
        System.out.println("listening on port " + server.getAddress().getPort());
    }
}
