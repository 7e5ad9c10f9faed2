// A receiver that records shipments. To use it, copy it and write `handle`.
import { Problem, createReceiver, serve } from 'outbox-relay-receiver';
import pg from 'pg';

// handle is the effect of an event. It writes through client, in the transaction that also remembers the event, and neither
// commits nor rolls back. After any error everything is rolled back; a Problem decides the answer.
async function handle(client, event, body) {
  if (event.type !== 'invoice.created') {
    throw new Problem(422, 'event-unknown', `This receiver has no handler for ${event.type}.`);
  }
  let payload;
  try {
    payload = JSON.parse(body);
  } catch { /* answered below */ }
  if (!payload?.invoice || !payload.total) throw new Problem(422, 'permanent-failure', 'The payload is not an invoice.');
  await client.query('INSERT INTO shipments (invoice, total) VALUES ($1, $2)', [payload.invoice, payload.total]);
}

const app = createReceiver({
  pool: new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 10, connectionTimeoutMillis: 5000 }),
  receiver: 'shipping', // unique among the receivers that share a database
  source: 'finance', // the sender; keys of two senders are independent
  secrets: process.env.FINANCE_SECRET ?? '',
  handle,
  effects: process.env.EFFECTS, // such as SELECT event_key FROM shipments, if the table has the event's key
});
serve(app, { host: process.env.HOST, port: Number(process.env.PORT ?? 8080), bodySeconds: Number(process.env.BODY_SECONDS ?? 10) });
