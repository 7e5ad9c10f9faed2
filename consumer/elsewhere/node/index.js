// Receives the events of outbox-relay with Express 5 and node-postgres 8. Every event takes effect once.
// docs/receiving-elsewhere.md of outbox-relay explains it.
import { createHash, createHmac, timingSafeEqual } from 'node:crypto';
import { createServer } from 'node:http';
import express from 'express';

const TOLERANCE_SECONDS = 300;
const MAX_BODY_BYTES = 1 << 20;

// An earlier handler may have left something on this connection: a search_path would hide the memory of events, and the rows of a
// temporary table would take effect once more. lock_timeout bounds the wait for another transaction that has the event. The idle
// timeout ends a handler that hangs. A sender never repeats what was answered, so the commit must reach the disk.
const BEGIN = `
BEGIN;
RESET ALL; RESET ROLE; DISCARD TEMP; SELECT pg_advisory_unlock_all();
SET LOCAL lock_timeout = '100ms';
SET LOCAL idle_in_transaction_session_timeout = '60s';
SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'`;

// ADMIT inserts the event's row. Without a row in return the event is known, or another transaction has it.
const ADMIT = `
INSERT INTO processed_events (receiver, source, idempotency_key, payload_hash, destination, event_type, event_version,
    related_reference, event_id, not_after, processing_state, processed_at, response_status)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, 'succeeded', now(), 204)
ON CONFLICT DO NOTHING
RETURNING coalesce(not_after < now() - interval '5 minutes', false) OR EXISTS (
    SELECT FROM inbox_forgotten f
    WHERE f.receiver = $1 AND f.source = $2 AND f.received_before > $11::timestamptz - interval '5 minutes') AS forgotten,
    pg_current_xact_id()::text AS xact`;

const RECALL = `
SELECT destination <> $5 AS other_destination, payload_hash <> $4 AS other_body, coalesce(response_status, 200) AS status
FROM processed_events WHERE receiver = $1 AND source = $2 AND idempotency_key = $3`;

// EXTEND records that the sender may repeat the event for longer than it said before, as after a replay.
const EXTEND = `
UPDATE processed_events SET not_after = $4
WHERE receiver = $1 AND source = $2 AND idempotency_key = $3 AND coalesce(not_after, '-infinity') < $4`;

// UNENDED returns a row if the transaction is still the one that inserted the event. It fails after an error that the handler
// did not pass on. Without it COMMIT would then roll back and report no error.
const UNENDED = 'SELECT WHERE pg_current_xact_id_if_assigned()::text = $1';

// ENDED marks an event whose handler has committed by itself: what that left out is unknown, so that its duplicates are refused.
const ENDED = `
UPDATE processed_events
SET processing_state = 'failed', processed_at = now(), response_status = 422, last_error = 'the handler ended the transaction'
WHERE receiver = $1 AND source = $2 AND idempotency_key = $3 AND processing_state = 'succeeded'
AND pg_xact_status($4::xid8) = 'committed'`;

// once lets the event take effect unless it has, and returns the status to answer.
export async function once({ pool, receiver, source, handle }, event, body) {
  const key = [receiver, source, event.idempotencyKey];
  const hash = createHash('sha256').update(body).digest();
  let client, broken, xact, failure = UNAVAILABLE;
  try {
    client = await pool.connect();
    await client.query(BEGIN);
    const { rows: [admitted] } = await client.query(ADMIT, [...key, hash, event.destination, event.type, event.version,
      event.reference, event.id, event.notAfter, event.createdAt]);
    if (admitted?.forgotten) throw FORGOTTEN;
    if (!admitted) {
      const { rows: [known] } = await client.query(RECALL, [...key, hash, event.destination]);
      if (!known) throw IN_FLIGHT;
      if (known.other_destination) throw OTHER_DESTINATION;
      if (known.other_body) throw KEY_REUSED;
      await client.query(EXTEND, [...key, event.notAfter]);
      await client.query('COMMIT');
      return { status: known.status, replayed: true };
    }
    await client.query('SET LOCAL lock_timeout TO DEFAULT');
    failure = HANDLER_FAILED;
    xact = admitted.xact;
    await handle(client, event, body);
    failure = COMMIT_FAILED;
    if ((await client.query(UNENDED, [xact])).rowCount !== 1) throw HANDLER_ENDED;
    xact = undefined;
    await client.query('COMMIT');
    return { status: 204, replayed: false };
  } catch (error) {
    const ended = await giveUp(client, key, xact).catch(() => { broken = true; });
    if (ended) logError('the handler committed by itself', event.idempotencyKey);
    if (ended) throw HANDLER_ENDED;
    if (error instanceof Problem) throw error;
    if (error.code === '55P03' && failure === UNAVAILABLE) throw IN_FLIGHT;
    logError(error, event.idempotencyKey);
    throw ['40001', '40P01'].includes(error.code) ? CONFLICT : failure;
  } finally {
    client?.release(broken);
  }
}

// giveUp rolls back, and reports whether the handler had committed by itself before.
async function giveUp(client, key, xact) {
  await client?.query('ROLLBACK');
  if (!xact) return false;
  await client.query('RESET ALL; RESET ROLE');
  return (await client.query(ENDED, [...key, xact])).rowCount === 1;
}

// Problem is a refusal as docs/wire.md lists it.
export class Problem extends Error {
  constructor(status, name, detail) {
    super(detail);
    Object.assign(this, { status, name });
  }
}
const UNAVAILABLE = new Problem(503, 'database-unavailable', 'Nothing was changed. Send the request again later.');
const CONFLICT = new Problem(503, 'serialization-failure', 'Nothing was changed. Send the request again.');
const IN_FLIGHT = new Problem(409, 'in-flight', 'The same event is being processed. Send it again later.');
const OTHER_DESTINATION = new Problem(421, 'other-destination', 'Two destinations lead to one receiver: give each its own name.');
const KEY_REUSED = new Problem(422, 'key-reused', 'The key was processed with another body. Send new content under a new key.');
const FORGOTTEN = new Problem(422, 'forgotten', 'The event may have been processed and forgotten. Nothing was changed.');
const HANDLER_FAILED = new Problem(500, 'handler-failed', 'Everything was rolled back. The receiver\'s log has the cause.');
const HANDLER_ENDED = new Problem(500, 'handler-ended-transaction', 'The handler must neither commit nor roll back.');
const COMMIT_FAILED = new Problem(500, 'commit-failed', 'The commit failed or its result is unknown. Send the request again.');
const NOT_POST = new Problem(405, 'method-not-allowed', 'outbox-relay reconcile sends them.');
const REPEATED = new Problem(409, 'question-repeated', 'Each question has its own key, and is answered once.');
const BUSY = new Problem(503, 'receiver-busy', 'Another question is being answered. Ask again later.');

// What `outbox-relay reconcile` asks, and how PostgreSQL answers. The question is a parameter, as the JSON that it came as.
const QUESTION = `
FROM (SELECT $1::text AS receiver, $2::text AS source, $3::boolean AS counts_effects, $4::json AS json) s,
  json_to_record(s.json) AS q (ask text, since timestamptz, until timestamptz, salt text, bounds text[], page bigint, after text,
    keys text[], "limit" integer)`;

const CHECK = `
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
  END AS problem`;

// A digest reads 2,048 pages of 8 KiB in their order, since that of the keys would read the table at random; the next question
// continues. A range ends with its bound, and sums are modulo 2^64. EFFECTS stands for the query.
const ANSWERS = {
  describe: `'now', clock_timestamp(),
    'remembers_since', (SELECT f.received_before FROM inbox_forgotten f WHERE f.receiver = s.receiver AND f.source = s.source)`,
  digest: `'next', coalesce(q.page, 0) + 2048,
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
        LIMIT 1000) h)`,
  list: `'held', (SELECT json_agg(h) FROM (
        SELECT p.idempotency_key AS key, p.received_at, p.processing_state AS state FROM processed_events p
        WHERE p.receiver = s.receiver AND p.source = s.source AND p.idempotency_key > coalesce(q.after, '')
        ORDER BY p.idempotency_key LIMIT q."limit") h)`,
  find: `'held', (SELECT json_agg(h) FROM (
        SELECT p.idempotency_key AS key, p.received_at, coalesce(p.event_id, 0)::text AS event_id,
          CASE WHEN p.processing_state <> 'recorded' THEN p.processing_state ELSE coalesce((SELECT i.processing_state FROM inbox_events i
            WHERE i.receiver = p.receiver AND i.source = p.source AND i.idempotency_key = p.idempotency_key), 'succeeded') END AS state
        FROM processed_events p
        WHERE p.receiver = s.receiver AND p.source = s.source AND p.idempotency_key = ANY (q.keys) ORDER BY p.idempotency_key) h)`,
  unfinished: `'held', (SELECT json_agg(h) FROM (
        SELECT i.idempotency_key AS key, i.received_at, i.processing_state AS state FROM inbox_events i
        WHERE i.receiver = s.receiver AND i.source = s.source AND i.processing_state IN ('failed', 'processing', 'pending')
          AND i.received_at >= coalesce(q.since, '-infinity') AND i.received_at < coalesce(q.until, 'infinity')
        ORDER BY i.idempotency_key LIMIT q."limit") h)`,
  doubled: `'held', (SELECT json_agg(h) FROM (
        SELECT t.key, t.effects FROM (SELECT e.key::text COLLATE "C" AS key, count(*) AS effects FROM (
EFFECTS
          ) AS e (key) WHERE e.key IS NOT NULL GROUP BY 1 HAVING count(*) > 1) t
        WHERE (q.keys IS NULL OR t.key = ANY (q.keys))
          AND (SELECT p.received_at >= coalesce(q.since, '-infinity') AND p.received_at < coalesce(q.until, 'infinity') FROM processed_events p
            WHERE p.receiver = s.receiver AND p.source = s.source AND p.idempotency_key = t.key)
        ORDER BY t.key LIMIT q."limit") h)`,
  missing: `'held', (SELECT json_agg(h) FROM (
        SELECT p.idempotency_key AS key, p.received_at, 'succeeded' AS state FROM processed_events p
        WHERE s.counts_effects AND p.receiver = s.receiver AND p.source = s.source
          AND p.received_at >= coalesce(q.since, '-infinity') AND p.received_at < coalesce(q.until, 'infinity')
          AND (q.keys IS NULL OR p.idempotency_key = ANY (q.keys))
          AND (p.processing_state = 'succeeded' OR p.processing_state = 'recorded' AND EXISTS (SELECT FROM inbox_events i
            WHERE i.receiver = p.receiver AND i.source = p.source AND i.idempotency_key = p.idempotency_key AND i.processing_state = 'succeeded'))
          AND NOT EXISTS (SELECT FROM (
EFFECTS
          ) AS e (key) WHERE e.key::text COLLATE "C" = p.idempotency_key)
        ORDER BY p.idempotency_key LIMIT q."limit") h)`,
};

// Nested loops would read all effects for each event where no index has their keys.
const READ = `
BEGIN READ ONLY;
RESET ALL; RESET ROLE;
SET LOCAL statement_timeout = '30s';
SET LOCAL lock_timeout = '2s';
SET LOCAL jit = off;
SET LOCAL work_mem = '32MB';
SET LOCAL enable_nestloop = off`;

const ASKED_SECONDS = 2 * TOLERANCE_SECONDS + 1; // for which a question could be sent again
const MAX_ASKED = 10_000;

// reconciler returns a function that answers the questions of `outbox-relay reconcile`: which events there are, and nothing of
// their content. One is answered at a time, and each once. Neither events nor questions can be sent in the other's place, as
// questions have other secrets.
export function reconciler({ pool, receiver, source, secrets, effects }) {
  const keys = parseSecrets(secrets).map((secret) => createHmac('sha256', secret).update('outbox-relay reconcile').digest());
  const asked = new Map();
  let busy = false;
  const remember = (key) => {
    const now = Date.now() / 1000;
    if (asked.size >= MAX_ASKED) asked.forEach((until, old) => until < now && asked.delete(old));
    if (asked.get(key) >= now) throw REPEATED;
    if (asked.size >= MAX_ASKED) throw BUSY;
    asked.set(key, now + ASKED_SECONDS);
  };
  return async (header, body) => {
    precheck(header);
    verify(keys, header, body);
    remember(header['x-idempotency-key'][0]);
    if (busy) throw BUSY;
    busy = true;
    let client, broken;
    try {
      client = await pool.connect();
      await client.query(READ);
      const values = [receiver, source, Boolean(effects), body.toString()];
      const { rows: [{ ask, problem }] } = await client.query(CHECK + QUESTION, values)
        .catch((error) => { throw error.code?.startsWith('22') ? new Problem(400, 'question-invalid', 'It is not the JSON of a question.') : error; });
      if (problem) throw new Problem(400, 'question-invalid', problem);
      if (ANSWERS[ask].includes('EFFECTS')) await client.query("SET LOCAL statement_timeout = '300s'");
      const part = ANSWERS[ask].replace('EFFECTS', () => effects || 'SELECT NULL WHERE false');
      const { rows: [{ answer }] } = await client.query(`
SELECT json_build_object('receiver', s.receiver, 'source', s.source, 'counts_effects', s.counts_effects, ${part})::text AS answer${QUESTION}`, values);
      return answer;
    } catch (error) {
      if (error instanceof Problem) throw error;
      logError(error);
      throw UNAVAILABLE;
    } finally {
      await client?.query('ROLLBACK').catch(() => { broken = true; });
      client?.release(broken);
      busy = false;
    }
  };
}

// precheck refuses what no body can make valid, before the body is read.
export function precheck(header) {
  const key = header['x-idempotency-key'];
  if (!key) throw new Problem(400, 'key-missing', 'The request has no X-Idempotency-Key.');
  if (key.length > 1) throw new Problem(400, 'key-repeated', 'The request has more than one X-Idempotency-Key.');
  for (const name of ['webhook-id', 'webhook-timestamp', 'webhook-signature']) {
    if (header[name]?.length !== 1) throw new Problem(401, 'signature-invalid', `${name} is missing or repeated.`);
  }
  const [timestamp] = header['webhook-timestamp'];
  if (!/^[0-9]{1,15}$/.test(timestamp)) throw new Problem(401, 'signature-invalid', 'webhook-timestamp is not a number.');
  if (Math.abs(Date.now() / 1000 - timestamp) > TOLERANCE_SECONDS) {
    throw new Problem(401, 'timestamp-out-of-tolerance', 'Compare the clocks of the two machines.');
  }
}

// COVERED are the names of the headers that x1 covers.
const COVERED = /^(x-idempotency-key$|x-outbox-|x-event-|ce-)/;

// verify refuses a request without a valid x1 signature, which covers these headers and the body.
export function verify(secrets, header, body) {
  const lines = Object.keys(header).sort()
    .filter((name) => COVERED.test(name))
    .flatMap((name) => header[name].map((value) => `${name}:${value}`));
  const text = ['x1', header['webhook-id'][0], header['webhook-timestamp'][0], ...lines, '', ''].join('\n');
  const offered = header['webhook-signature'][0].split(' ').map((entry) => Buffer.from(entry));
  for (const secret of secrets) {
    const mac = createHmac('sha256', secret).update(text, 'latin1').update(body).digest('base64');
    const wanted = Buffer.from(`x1,${mac}`);
    if (offered.some((entry) => entry.length === wanted.length && timingSafeEqual(entry, wanted))) return;
  }
  throw new Problem(401, 'signature-invalid', 'No x1 signature matches: the secret differs, or the request was changed.');
}

// eventOf reads the verified headers.
export function eventOf(header) {
  const read = (name, pattern, absent) => {
    const values = header[name] ?? [];
    if (values.length === 0 && absent !== undefined) return absent;
    if (values.length !== 1 || !pattern.test(values[0])) throw new Problem(400, 'header-invalid', `${name} is malformed.`);
    return values[0];
  };
  const text = /^[\x20-\x7e]{1,255}$/, number = /^[0-9]{1,18}$/, time = /^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,}(Z|[+-][0-9:]{5})$/;
  return {
    idempotencyKey: read('x-idempotency-key', text),
    type: read('x-outbox-event-type', text),
    version: read('x-outbox-event-version', /^[0-9]{1,9}$/, '1'),
    id: read('x-outbox-event-id', number, null),
    createdAt: read('x-outbox-created-at', time),
    notAfter: read('x-outbox-not-after', time, null),
    reference: read('x-outbox-related-reference', text, null),
    destination: read('x-outbox-destination', text, null),
  };
}

function logError(error, key) {
  console.error(typeof key === 'string' ? `event ${key}:` : '', error.code ?? '', error.stack);
}

// parseSecrets reads one secret, or several separated by commas while they rotate.
export function parseSecrets(list) {
  return list.split(',').map((text) => {
    const key = Buffer.from(text.trim().replace(/^whsec_/, ''), 'base64');
    if (key.length < 24 || key.length > 64) throw new Error('secret: want whsec_ and 24 to 64 bytes in base64');
    return key;
  });
}

// createReceiver returns an Express application that takes events by POST at path, and answers the questions of `outbox-relay
// reconcile` at path/reconcile. Mount it before anything that reads bodies. effects, if given, is a query for the key of each effect.
export function createReceiver({ pool, receiver, source, secrets, handle, effects, path = '/webhooks/finance' }) {
  const keys = parseSecrets(secrets), answer = reconciler({ pool, receiver, source, secrets, effects });
  pool.on('error', logError); // without these a lost connection ends the process
  pool.on('connect', (client) => client.on('error', logError));
  const app = express();
  app.disable('x-powered-by');
  const check = (request, response, next) => {
    precheck(request.headersDistinct);
    next();
  };
  const raw = express.raw({ type: () => true, limit: MAX_BODY_BYTES, inflate: false });
  app.post(path, check, raw, async (request, response) => {
    const body = request.body ?? Buffer.alloc(0);
    verify(keys, request.headersDistinct, body);
    const { status, replayed } = await once({ pool, receiver, source, handle }, eventOf(request.headersDistinct), body);
    if (replayed) response.set('Idempotency-Replayed', 'true');
    response.status(status).end();
  });
  const isPost = (request, response, next) => {
    if (request.method !== 'POST') throw NOT_POST;
    next();
  };
  app.all(`${path}/reconcile`, isPost, check, raw, async (request, response) => {
    const text = await answer(request.headersDistinct, request.body ?? Buffer.alloc(0));
    response.set({ 'Content-Type': 'application/json', 'Cache-Control': 'no-store' }).end(text);
  });
  app.use(answerError);
  return app;
}

// TITLES are those of Go receivers, by the names of refusals. A handler's own name has OTHER_TITLE.
const OTHER_TITLE = 'The receiver refused the event';
const TITLES = {
  'key-missing': 'The request has no idempotency key',
  'key-repeated': 'The request names its key more than once',
  'header-invalid': 'A header about the event is malformed',
  'signature-invalid': 'The request\'s signature is not valid',
  'timestamp-out-of-tolerance': 'The request is not recent',
  'body-unreadable': 'The body did not arrive whole',
  'body-too-large': 'The body is too large',
  'database-unavailable': 'The receiver\'s database did not take the request',
  'serialization-failure': 'A concurrent transaction was in the way',
  'in-flight': 'The same event is being processed',
  'other-destination': 'The event is known from another destination',
  'key-reused': 'The idempotency key was used for another body',
  'forgotten': 'The event may have been processed and forgotten',
  'event-unknown': 'No handler takes the event',
  'permanent-failure': 'The handler refused the event for good',
  'handler-failed': 'The handler did not succeed',
  'handler-ended-transaction': 'The handler ended the middleware\'s transaction',
  'commit-failed': 'The handler\'s work was not committed',
  'method-not-allowed': 'Questions are sent by POST',
  'question-invalid': 'The question is malformed',
  'question-repeated': 'The question was asked before',
  'receiver-busy': 'The receiver reads too many requests at once',
};

function answerError(error, request, response, next) { // Express knows it by its four parameters
  let problem = error;
  if (error.type === 'entity.too.large') {
    problem = new Problem(413, 'body-too-large', `At most ${MAX_BODY_BYTES} bytes are accepted.`);
  } else if (error.type) { // of express.raw
    problem = new Problem(408, 'body-unreadable', 'The body did not arrive whole.');
  } else if (!(error instanceof Problem)) {
    logError(error);
    problem = HANDLER_FAILED;
  }
  const { status, name, message } = problem;
  const retry = status === 409 || status === 503 ? { 'Retry-After': '1' } : {};
  response.writeHead(status, { 'Content-Type': 'application/problem+json', ...retry })
    .end(JSON.stringify({ type: `urn:outbox-relay:problem:${name}`, title: TITLES[name] ?? OTHER_TITLE, status, detail: message }));
}

// serve answers requests to app, and returns the server. Node ends a request that has not arrived whole after bodySeconds, with
// 408. A relay keeps idle connections for 90 s.
export function serve(app, { host = '127.0.0.1', port = 8080, bodySeconds = 10 } = {}) {
  const server = createServer({ requestTimeout: bodySeconds * 1000, connectionsCheckingInterval: 1000, keepAliveTimeout: 95_000 }, app);
  return server.listen(port, host, () => console.log(`listening on port ${server.address().port}`));
}
