"""Receives the events of outbox-relay with the standard library and psycopg 3, on Python 3.9 or newer. Every event takes effect once.

docs/receiving-elsewhere.md of outbox-relay explains it.
"""
from __future__ import annotations

import base64, hashlib, hmac, json, logging, re, threading, time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Mapping, Sequence, TypedDict

import psycopg
from psycopg_pool import ConnectionPool

__all__ = ["Event", "Problem", "Receiver", "Reconciler", "Server", "event_of", "once", "parse_secrets", "precheck", "verify"]

TOLERANCE_SECONDS = 300
MAX_BODY_BYTES = 1 << 20
Headers = Mapping[str, Sequence[str]]  # lists of values by names in lower case


class Event(TypedDict):
    """An event, from the verified headers of its request."""

    idempotency_key: str
    type: str
    version: int
    id: str | None
    created_at: str
    not_after: str | None
    reference: str | None
    destination: str | None  # by which the sender calls this receiver


@dataclass(frozen=True)
class Receiver:
    """What a receiver is.

    handle applies the effect of an event through its connection, in the transaction that also remembers the event. It neither
    commits nor rolls back. After any exception everything is rolled back; a Problem decides the answer.
    """

    pool: ConnectionPool
    receiver: str  # unique among the receivers that share a database
    source: str  # the sender; keys of two senders are independent
    secrets: str  # whsec_…; several while they rotate, separated by commas
    handle: Callable[[psycopg.Connection, Event, bytes], Any]
    path: str = "/webhooks/finance"  # of events; questions of `outbox-relay reconcile` come to path/reconcile
    effects: str | None = None  # a query for the key of each effect, by which reconcile finds doubled and lost effects
    body_seconds: float = 10


def parse_secrets(text: str) -> list[bytes]:
    """Read one secret, or several separated by commas."""
    secrets = [base64.b64decode(secret.strip().removeprefix("whsec_"), validate=True) for secret in text.split(",")]
    if not all(24 <= len(secret) <= 64 for secret in secrets):
        raise ValueError("secret: want whsec_ and 24 to 64 bytes in base64")
    return secrets


# An earlier handler may have left something on this connection: a search_path would hide the memory of events, and the rows of a
# temporary table would take effect once more. lock_timeout bounds the wait for another transaction that has the event. The idle
# timeout ends a handler that hangs. A sender never repeats what was answered, so the commit must reach the disk.
BEGIN = """
RESET ALL; RESET ROLE; DISCARD TEMP; SELECT pg_advisory_unlock_all();
SET LOCAL lock_timeout = '100ms';
SET LOCAL idle_in_transaction_session_timeout = '60s';
SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"""

# ADMIT inserts the event's row. Without a row in return the event is known, or another transaction has it.
ADMIT = """
INSERT INTO processed_events (receiver, source, idempotency_key, payload_hash, destination, event_type, event_version,
    related_reference, event_id, not_after, processing_state, processed_at, response_status)
VALUES (%(receiver)s, %(source)s, %(idempotency_key)s, %(hash)s, %(destination)s, %(type)s, %(version)s,
    %(reference)s, %(id)s, %(not_after)s, 'succeeded', now(), 204)
ON CONFLICT DO NOTHING
RETURNING coalesce(not_after < now() - interval '5 minutes', false) OR EXISTS (
    SELECT FROM inbox_forgotten f WHERE f.receiver = %(receiver)s AND f.source = %(source)s
    AND f.received_before > %(created_at)s::timestamptz - interval '5 minutes'),
    pg_current_xact_id()::text"""

RECALL = """
SELECT destination <> %(destination)s, payload_hash <> %(hash)s, coalesce(response_status, 200)
FROM processed_events WHERE receiver = %(receiver)s AND source = %(source)s AND idempotency_key = %(idempotency_key)s"""

# EXTEND records that the sender may repeat the event for longer than it said before, as after a replay.
EXTEND = """
UPDATE processed_events SET not_after = %(not_after)s
WHERE receiver = %(receiver)s AND source = %(source)s AND idempotency_key = %(idempotency_key)s
AND coalesce(not_after, '-infinity') < %(not_after)s"""

# UNENDED returns a row if the transaction is still the one that inserted the event. It fails after an error that the handler
# did not pass on. Without it COMMIT would then roll back and report no error.
UNENDED = "SELECT 1 WHERE pg_current_xact_id_if_assigned()::text = %s"

# ENDED marks an event whose handler has committed by itself: what that left out is unknown, so that its duplicates are refused.
ENDED = """
UPDATE processed_events
SET processing_state = 'failed', processed_at = now(), response_status = 422, last_error = 'the handler ended the transaction'
WHERE receiver = %(receiver)s AND source = %(source)s AND idempotency_key = %(idempotency_key)s AND processing_state = 'succeeded'
AND pg_xact_status(%(xact)s::xid8) = 'committed'"""


def once(to: Receiver, event: Event, body: bytes) -> tuple[int, bool]:
    """Let the event take effect unless it has. Return the status to answer, and whether it is that of an earlier answer."""
    row = dict(event, receiver=to.receiver, source=to.source, hash=hashlib.sha256(body).digest())
    failure = Problem(503, "database-unavailable", "Nothing was changed. Send the request again later.")
    try:
        with to.pool.connection() as conn:  # an exception rolls back
            conn.execute(BEGIN)
            admitted = conn.execute(ADMIT, row).fetchone()
            if admitted is None:
                return recall(conn, row), True
            forgotten, xact = admitted
            if forgotten:
                raise Problem(422, "forgotten", "The event may have been processed and forgotten. Nothing was changed.")
            conn.execute("SET LOCAL lock_timeout TO DEFAULT")
            failure = Problem(500, "handler-failed", "Everything was rolled back. The receiver's log has the cause.")
            try:
                to.handle(conn, event, body)
                failure = Problem(500, "commit-failed", "The commit failed or its result is unknown. Send the request again.")
                if conn.execute(UNENDED, [xact]).fetchone() is None:
                    raise HANDLER_ENDED
            except Exception:
                conn.rollback()
                conn.execute(BEGIN)
                if conn.execute(ENDED, dict(row, xact=xact)).rowcount == 1:
                    conn.commit()
                    logging.error("event %s: the handler committed by itself", event["idempotency_key"])
                    raise HANDLER_ENDED
                raise
            conn.commit()
            return 204, False
    except Problem:
        raise
    except Exception as error:
        if isinstance(error, psycopg.errors.LockNotAvailable) and failure.status == 503:
            raise IN_FLIGHT
        logging.exception("event %s", event["idempotency_key"])
        if isinstance(error, (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected)):
            raise Problem(503, "serialization-failure", "Nothing was changed. Send the request again.")
        raise failure


def recall(conn: psycopg.Connection, row: dict) -> int:
    """Return the status of an event that was not admitted, or raise why it is refused."""
    known = conn.execute(RECALL, row).fetchone()
    if known is None:
        raise IN_FLIGHT
    other_destination, other_body, status = known
    if other_destination:
        raise Problem(421, "other-destination", "Two destinations lead to one receiver: give each its own name.")
    if other_body:
        raise Problem(422, "key-reused", "The key was processed with another body. Send new content under a new key.")
    conn.execute(EXTEND, row)
    return status


class Problem(Exception):
    """A refusal as docs/wire.md lists it."""

    def __init__(self, status: int, name: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.name, self.detail = status, name, detail


IN_FLIGHT = Problem(409, "in-flight", "The same event is being processed. Send it again later.")
HANDLER_ENDED = Problem(500, "handler-ended-transaction", "The handler must neither commit nor roll back.")
BUSY = Problem(503, "receiver-busy", "Another question is being answered. Ask again later.")


# TITLES are those of Go receivers, by the names of refusals. A handler's own name has OTHER_TITLE.
OTHER_TITLE = "The receiver refused the event"
TITLES = {
    "key-missing": "The request has no idempotency key",
    "key-repeated": "The request names its key more than once",
    "header-invalid": "A header about the event is malformed",
    "signature-invalid": "The request's signature is not valid",
    "timestamp-out-of-tolerance": "The request is not recent",
    "body-unreadable": "The body did not arrive whole",
    "body-too-large": "The body is too large",
    "database-unavailable": "The receiver's database did not take the request",
    "serialization-failure": "A concurrent transaction was in the way",
    "in-flight": "The same event is being processed",
    "other-destination": "The event is known from another destination",
    "key-reused": "The idempotency key was used for another body",
    "forgotten": "The event may have been processed and forgotten",
    "event-unknown": "No handler takes the event",
    "permanent-failure": "The handler refused the event for good",
    "handler-failed": "The handler did not succeed",
    "handler-ended-transaction": "The handler ended the middleware's transaction",
    "commit-failed": "The handler's work was not committed",
    "method-not-allowed": "Questions are sent by POST",
    "question-invalid": "The question is malformed",
    "question-repeated": "The question was asked before",
    "receiver-busy": "The receiver reads too many requests at once",
}


def precheck(header: Headers) -> None:
    """Refuse what no body can make valid, before the body is read."""
    keys = header.get("x-idempotency-key", [])
    if not keys:
        raise Problem(400, "key-missing", "The request has no X-Idempotency-Key.")
    if len(keys) > 1:
        raise Problem(400, "key-repeated", "The request has more than one X-Idempotency-Key.")
    for name in ("webhook-id", "webhook-timestamp", "webhook-signature"):
        if len(header.get(name, [])) != 1:
            raise Problem(401, "signature-invalid", f"{name} is missing or repeated.")
    timestamp = header["webhook-timestamp"][0]
    if not re.fullmatch("[0-9]{1,15}", timestamp):
        raise Problem(401, "signature-invalid", "webhook-timestamp is not a number.")
    if abs(time.time() - int(timestamp)) > TOLERANCE_SECONDS:
        raise Problem(401, "timestamp-out-of-tolerance", "Compare the clocks of the two machines.")


def verify(secrets: Sequence[bytes], header: Headers, body: bytes) -> None:
    """Refuse a request without a valid x1 signature, which covers the key, every header that begins so, and the body."""
    lines = [f"{name}:{value}\n" for name in sorted(header)
             if name == "x-idempotency-key" or name.startswith(("x-outbox-", "x-event-", "ce-")) for value in header[name]]
    text = f"x1\n{header['webhook-id'][0]}\n{header['webhook-timestamp'][0]}\n{''.join(lines)}\n".encode("latin-1")
    offered = header["webhook-signature"][0].encode("latin-1").split()
    for secret in secrets:
        wanted = b"x1," + base64.b64encode(hmac.new(secret, text + body, hashlib.sha256).digest())
        if any(hmac.compare_digest(entry, wanted) for entry in offered):
            return
    raise Problem(401, "signature-invalid", "No x1 signature matches: the secret differs, or the request was changed.")


def event_of(header: Headers) -> Event:
    """Read the verified headers."""
    def read(name, pattern, *absent):
        values = header.get(name, [])
        if not values and absent:
            return absent[0]
        if len(values) != 1 or not re.fullmatch(pattern, values[0]):
            raise Problem(400, "header-invalid", f"{name} is malformed.")
        return values[0]

    text, moment = "[ -~]{1,255}", "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,}(Z|[+-][0-9:]{5})"
    return {
        "idempotency_key": read("x-idempotency-key", text),
        "type": read("x-outbox-event-type", text),
        "version": int(read("x-outbox-event-version", "[0-9]{1,9}", "1")),
        "id": read("x-outbox-event-id", "[0-9]{1,18}", None),
        "created_at": read("x-outbox-created-at", moment),
        "not_after": read("x-outbox-not-after", moment, None),
        "reference": read("x-outbox-related-reference", text, None),
        "destination": read("x-outbox-destination", text, None),
    }


# What `outbox-relay reconcile` asks, and how PostgreSQL answers. The question is a parameter, as the JSON that it came as.
QUESTION = """
FROM (SELECT %s::text AS receiver, %s::text AS source, %s::boolean AS counts_effects, %s::json AS json) s,
  json_to_record(s.json) AS q (ask text, since timestamptz, until timestamptz, salt text, bounds text[], page bigint, after text,
    keys text[], "limit" integer)"""

CHECK = """
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
  END AS problem"""

# A digest reads 2,048 pages of 8 KiB in their order, since that of the keys would read the table at random; the next question
# continues. A range ends with its bound, and sums are modulo 2^64. EFFECTS stands for the query.
ANSWERS = {
    "describe": """'now', clock_timestamp(),
    'remembers_since', (SELECT f.received_before FROM inbox_forgotten f WHERE f.receiver = s.receiver AND f.source = s.source)""",
    "digest": """'next', coalesce(q.page, 0) + 2048,
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
    "list": """'held', (SELECT json_agg(h) FROM (
        SELECT p.idempotency_key AS key, p.received_at, p.processing_state AS state FROM processed_events p
        WHERE p.receiver = s.receiver AND p.source = s.source AND p.idempotency_key > coalesce(q.after, '')
        ORDER BY p.idempotency_key LIMIT q."limit") h)""",
    "find": """'held', (SELECT json_agg(h) FROM (
        SELECT p.idempotency_key AS key, p.received_at, coalesce(p.event_id, 0)::text AS event_id,
          CASE WHEN p.processing_state <> 'recorded' THEN p.processing_state ELSE coalesce((SELECT i.processing_state FROM inbox_events i
            WHERE i.receiver = p.receiver AND i.source = p.source AND i.idempotency_key = p.idempotency_key), 'succeeded') END AS state
        FROM processed_events p
        WHERE p.receiver = s.receiver AND p.source = s.source AND p.idempotency_key = ANY (q.keys) ORDER BY p.idempotency_key) h)""",
    "unfinished": """'held', (SELECT json_agg(h) FROM (
        SELECT i.idempotency_key AS key, i.received_at, i.processing_state AS state FROM inbox_events i
        WHERE i.receiver = s.receiver AND i.source = s.source AND i.processing_state IN ('failed', 'processing', 'pending')
          AND i.received_at >= coalesce(q.since, '-infinity') AND i.received_at < coalesce(q.until, 'infinity')
        ORDER BY i.idempotency_key LIMIT q."limit") h)""",
    "doubled": """'held', (SELECT json_agg(h) FROM (
        SELECT t.key, t.effects FROM (SELECT e.key::text COLLATE "C" AS key, count(*) AS effects FROM (
EFFECTS
          ) AS e (key) WHERE e.key IS NOT NULL GROUP BY 1 HAVING count(*) > 1) t
        WHERE (q.keys IS NULL OR t.key = ANY (q.keys))
          AND (SELECT p.received_at >= coalesce(q.since, '-infinity') AND p.received_at < coalesce(q.until, 'infinity') FROM processed_events p
            WHERE p.receiver = s.receiver AND p.source = s.source AND p.idempotency_key = t.key)
        ORDER BY t.key LIMIT q."limit") h)""",
    "missing": """'held', (SELECT json_agg(h) FROM (
        SELECT p.idempotency_key AS key, p.received_at, 'succeeded' AS state FROM processed_events p
        WHERE s.counts_effects AND p.receiver = s.receiver AND p.source = s.source
          AND p.received_at >= coalesce(q.since, '-infinity') AND p.received_at < coalesce(q.until, 'infinity')
          AND (q.keys IS NULL OR p.idempotency_key = ANY (q.keys))
          AND (p.processing_state = 'succeeded' OR p.processing_state = 'recorded' AND EXISTS (SELECT FROM inbox_events i
            WHERE i.receiver = p.receiver AND i.source = p.source AND i.idempotency_key = p.idempotency_key AND i.processing_state = 'succeeded'))
          AND NOT EXISTS (SELECT FROM (
EFFECTS
          ) AS e (key) WHERE e.key::text COLLATE "C" = p.idempotency_key)
        ORDER BY p.idempotency_key LIMIT q."limit") h)""",
}

# Nested loops would read all effects for each event where no index has their keys.
READ = """
RESET ALL; RESET ROLE;
SET TRANSACTION READ ONLY;
SET LOCAL statement_timeout = '30s';
SET LOCAL lock_timeout = '2s';
SET LOCAL jit = off;
SET LOCAL work_mem = '32MB';
SET LOCAL enable_nestloop = off"""

ASKED_SECONDS = 2 * TOLERANCE_SECONDS + 1  # for which a question could be sent again
MAX_ASKED = 10_000


class Reconciler:
    """Answers the questions of `outbox-relay reconcile`: which events there are, and nothing of their content.

    One is answered at a time, and each once. Neither events nor questions can be sent in the other's place, as questions have
    other secrets.
    """

    def __init__(self, to: Receiver) -> None:
        self.to = to
        self.secrets = [hmac.new(secret, b"outbox-relay reconcile", hashlib.sha256).digest() for secret in parse_secrets(to.secrets)]
        self.asked: dict[str, float] = {}  # until when a question could be sent again, by its key
        self.remembering, self.answering = threading.Lock(), threading.Lock()

    def answer(self, header: Headers, body: bytes) -> str:
        """Return the answer as JSON, or raise why there is none."""
        precheck(header)
        verify(self.secrets, header, body)
        with self.remembering:
            self.remember(header["x-idempotency-key"][0])
        if not self.answering.acquire(blocking=False):
            raise BUSY
        try:
            return self.read([self.to.receiver, self.to.source, bool(self.to.effects), body.decode("utf-8", "replace")])
        except (psycopg.Error, OSError) as error:
            logging.exception("question")
            raise Problem(503, "database-unavailable", "Nothing was changed. Send the request again later.") from error
        finally:
            self.answering.release()

    def remember(self, key: str) -> None:
        now = time.time()
        if len(self.asked) >= MAX_ASKED:
            self.asked = {old: until for old, until in self.asked.items() if until >= now}
        if self.asked.get(key, 0) >= now:
            raise Problem(409, "question-repeated", "Each question has its own key, and is answered once.")
        if len(self.asked) >= MAX_ASKED:
            raise BUSY
        self.asked[key] = now + ASKED_SECONDS

    def read(self, values: list) -> str:
        with self.to.pool.connection() as conn:
            conn.execute(READ)
            try:
                ask, problem = conn.execute(CHECK + QUESTION, values).fetchone()
            except psycopg.DataError:
                raise Problem(400, "question-invalid", "It is not the JSON of a question.")
            if problem:
                raise Problem(400, "question-invalid", problem)
            if "EFFECTS" in ANSWERS[ask]:
                conn.execute("SET LOCAL statement_timeout = '300s'")
            part = ANSWERS[ask].replace("EFFECTS", (self.to.effects or "SELECT NULL WHERE false").replace("%", "%%"))
            return conn.execute(f"""
SELECT json_build_object('receiver', s.receiver, 'source', s.source, 'counts_effects', s.counts_effects, {part})::text{QUESTION}""", values).fetchone()[0]


class Webhook(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 10  # for the headers of a request, and until the next request

    def do_POST(self):
        try:
            to = self.server.to
            if self.path not in (to.path, to.path + "/reconcile"):
                raise Problem(404, "not-found", f"Send events to {to.path}.")
            if self.command != "POST":
                raise Problem(405, "method-not-allowed", "outbox-relay reconcile sends them.")
            header = {}
            for name, value in self.headers.items():
                header.setdefault(name.lower(), []).append(value.strip(" \t"))
            precheck(header)
            body = self.read_body(to.body_seconds)
            if self.path != to.path:
                text = self.server.reconciler.answer(header, body)
                self.answer(200, {"Content-Type": "application/json", "Cache-Control": "no-store"}, text.encode())
                return
            verify(self.server.secrets, header, body)
            status, replayed = once(to, event_of(header), body)
            self.answer(status, {"Idempotency-Replayed": "true"} if replayed else {})
        except Problem as problem:
            self.close_connection = True  # the body may not have been read
            retry = {"Retry-After": "1"} if problem.status in (409, 503) else {}
            text = json.dumps({"type": "urn:outbox-relay:problem:" + problem.name, "title": TITLES.get(problem.name, OTHER_TITLE), "status": problem.status,
                               "detail": problem.detail})
            self.answer(problem.status, {"Content-Type": "application/problem+json", "Connection": "close", **retry}, text.encode())

    do_GET = do_POST

    def read_body(self, seconds):
        """Read the body, which a proxy on the way may have cut into chunks."""
        body, deadline = bytearray(), time.monotonic() + seconds

        def take(most):
            try:
                self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
                part = self.rfile.read1(most)
            except OSError:
                part = b""
            if not part:
                raise Problem(408, "body-unreadable", "The body did not arrive whole and in time.")
            return part

        def read(size):
            end = len(body) + size
            while len(body) < end:
                body.extend(take(min(end - len(body), 65536)))
                if len(body) > MAX_BODY_BYTES:
                    raise Problem(413, "body-too-large", f"At most {MAX_BODY_BYTES} bytes are accepted.")

        def read_line(pattern):
            line = b""
            while not line.endswith(b"\r\n"):
                line += take(1)
                if len(line) > 10:
                    break
            if not re.fullmatch(pattern + b"\r\n", line):
                raise Problem(400, "header-invalid", "A chunk is malformed, or has an extension or a trailer.")
            return line[:-2]

        length, coding = self.headers.get_all("Content-Length", []), self.headers.get_all("Transfer-Encoding", [])
        if len(length) == 1 and not coding and re.fullmatch("[0-9]{1,15}", length[0]):
            read(int(length[0]))
        elif not length and [name.lower() for name in coding] == ["chunked"]:
            while size := int(read_line(b"[0-9A-Fa-f]{1,8}"), 16):
                read(size)
                read_line(b"")
            read_line(b"")
        else:
            raise Problem(400, "header-invalid", "Content-Length, or Transfer-Encoding: chunked, is required.")
        self.connection.settimeout(self.timeout)
        return bytes(body)

    def answer(self, status, headers, body=b""):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """An HTTP server for one receiver. Address and port are those of HTTPServer."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], to: Receiver) -> None:
        self.to, self.secrets, self.reconciler = to, parse_secrets(to.secrets), Reconciler(to)
        super().__init__(address, Webhook)
