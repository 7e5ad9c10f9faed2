// Receives the events of outbox-relay with Express 5 and node-postgres 8. Every event takes effect once.
// docs/receiving-elsewhere.md of outbox-relay explains it.
import { createHash, createHmac, timingSafeEqual } from 'node:crypto';
import { createServer } from 'node:http';
import express from 'express';

const TOLERANCE_SECONDS = 300;
const MAX_BODY_BYTES = 1 << 20;

// An earlier handler may have changed this connection: a search_path would hide the memory of events. lock_timeout bounds the
// wait for another transaction that has the event. The idle timeout ends a handler that hangs. A sender never repeats what was
// answered, so the commit must reach the disk.
const BEGIN = `
BEGIN;
RESET ALL; RESET ROLE;
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

// once lets the event take effect unless it has, and returns the status to answer.
export async function once({ pool, receiver, source, handle }, event, body) {
  const key = [receiver, source, event.key];
  const hash = createHash('sha256').update(body).digest();
  let client, broken, failure = UNAVAILABLE;
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
    await handle(client, event, body);
    failure = COMMIT_FAILED;
    if ((await client.query(UNENDED, [admitted.xact])).rowCount !== 1) throw ENDED;
    await client.query('COMMIT');
    return { status: 204, replayed: false };
  } catch (error) {
    await client?.query('ROLLBACK').catch(() => { broken = true; });
    if (error instanceof Problem) throw error;
    if (error.code === '55P03' && failure === UNAVAILABLE) throw IN_FLIGHT;
    logError(error, event.key);
    throw ['40001', '40P01'].includes(error.code) ? CONFLICT : failure;
  } finally {
    client?.release(broken);
  }
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
const ENDED = new Problem(500, 'handler-ended-transaction', 'The handler must neither commit nor roll back.');
const COMMIT_FAILED = new Problem(500, 'commit-failed', 'The commit failed or its result is unknown. Send the request again.');

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

// verify refuses a request without a valid x1 signature, which covers the key, every X-Outbox-* header and the body.
export function verify(secrets, header, body) {
  const lines = Object.keys(header).sort()
    .filter((name) => name === 'x-idempotency-key' || name.startsWith('x-outbox-'))
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
    key: read('x-idempotency-key', text),
    type: read('x-outbox-event-type', text),
    version: read('x-outbox-event-version', /^[0-9]{1,9}$/, '1'),
    id: read('x-outbox-event-id', number, null),
    createdAt: read('x-outbox-created-at', time),
    notAfter: read('x-outbox-not-after', time, null),
    reference: read('x-outbox-related-reference', text, null),
    // The delivery's id is the event's id, the destination and the number of the claim.
    destination: /^[0-9]+-(.+)-[0-9]+$/.exec(read('x-outbox-delivery-id', text, ''))?.[1] ?? null,
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

// createReceiver returns an Express application that answers POST at path. Mount it before anything that reads bodies.
export function createReceiver({ pool, receiver, source, secrets, handle, path = '/webhooks/finance' }) {
  const keys = parseSecrets(secrets);
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
