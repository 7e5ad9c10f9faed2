import assert from 'node:assert/strict';
import { createHmac } from 'node:crypto';
import { test } from 'node:test';
import { eventOf, once, parseSecrets, precheck, Problem, verify } from 'outbox-relay-receiver';
import pg from 'pg';

// What needs PostgreSQL is tested by `make test-elsewhere` of outbox-relay.

const secret = Buffer.alloc(32, 7);
const secrets = [Buffer.alloc(24, 1), secret];

function signed(body, change = {}) {
  const header = {
    'webhook-id': ['k1'], 'webhook-timestamp': [String(Math.floor(Date.now() / 1000))], 'x-idempotency-key': ['k1'],
    'x-outbox-event-type': ['invoice.created'], 'x-outbox-created-at': ['2026-01-02T03:04:05Z'], 'x-outbox-delivery-id': ['7-other-9'], 'x-outbox-destination': ['logistics-1'],
    'x-event-tenant': ['a'], 'ce-type': ['invoice.created'], 'content-type': ['application/json'], ...change,
  };
  const lines = Object.keys(header).sort().filter((name) => /^(x|ce)-/.test(name)).map((name) => `${name}:${header[name][0]}`);
  const text = ['x1', header['webhook-id'][0], header['webhook-timestamp'][0], ...lines, '', ''].join('\n') + body;
  header['webhook-signature'] = [`v1,AAAA x1,${createHmac('sha256', secret).update(text, 'latin1').digest('base64')}`];
  return header;
}

const problem = (status, name) => (error) => error instanceof Problem && error.status === status && error.name === name;

test('a signed request is an event', () => {
  const header = signed('{}');
  precheck(header);
  verify(secrets, header, Buffer.from('{}'));
  const event = eventOf(header);
  assert.deepEqual([event.idempotencyKey, event.type, event.version, event.destination, event.notAfter], ['k1', 'invoice.created', '1', 'logistics-1', null]);
});

test('what was changed on its way is refused', () => {
  const header = signed('{}');
  assert.throws(() => verify(secrets, header, Buffer.from('[]')), problem(401, 'signature-invalid'));
  assert.throws(() => verify([secrets[0]], header, Buffer.from('{}')), problem(401, 'signature-invalid'));
  for (const name of ['x-outbox-event-type', 'x-outbox-destination', 'x-event-tenant', 'x-event-role', 'ce-type', 'ce-id']) {
    assert.throws(() => verify(secrets, { ...header, [name]: ['other'] }, Buffer.from('{}')), problem(401, 'signature-invalid'), name);
  }
});

test('what no body can make valid is refused first', () => {
  assert.throws(() => precheck(signed('', { 'webhook-timestamp': ['1'] })), problem(401, 'timestamp-out-of-tolerance'));
  assert.throws(() => precheck({}), problem(400, 'key-missing'));
  assert.throws(() => eventOf(signed('', { 'x-outbox-created-at': ['yesterday'] })), problem(400, 'header-invalid'));
});

test('secrets are checked', () => {
  assert.equal(parseSecrets(`whsec_${secret.toString('base64')}, ${secrets[0].toString('base64')}`).length, 2);
  assert.throws(() => parseSecrets('whsec_short'));
});

test('once is for every framework', async () => {
  const pool = new pg.Pool({ host: '127.0.0.1', port: 1 }); // nothing listens there
  const config = { pool, receiver: 'shipping', source: 'finance', handle: () => assert.fail('the handler ran') };
  await assert.rejects(once(config, eventOf(signed('{}')), Buffer.from('{}')), problem(503, 'database-unavailable'));
  await pool.end();
});
