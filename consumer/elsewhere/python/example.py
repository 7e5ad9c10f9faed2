"""A receiver that records shipments. To use it, copy it and write handle."""
import json, os

from psycopg_pool import ConnectionPool

from outbox_relay_receiver import Problem, Receiver, Server


def handle(conn, event, body):
    """Apply the effect of an event through conn, in the transaction that also remembers the event.

    It neither commits nor rolls back. After any exception everything is rolled back; a Problem decides the answer.
    """
    if event["type"] != "invoice.created":
        raise Problem(422, "event-unknown", f"This receiver has no handler for {event['type']}.")
    try:
        payload = json.loads(body)
        shipment = [payload["invoice"], payload["total"]]
    except (ValueError, TypeError, KeyError):
        raise Problem(422, "permanent-failure", "The payload is not an invoice.")
    conn.execute("INSERT INTO shipments (invoice, total) VALUES (%s, %s)", shipment)


if __name__ == "__main__":
    with ConnectionPool(os.environ["DATABASE_URL"], min_size=1, max_size=10, timeout=5) as pool:
        shipping = Receiver(pool=pool, receiver="shipping", source="finance", secrets=os.environ["FINANCE_SECRET"], handle=handle,
                            effects=os.environ.get("EFFECTS"),  # such as SELECT event_key FROM shipments, if the table has the event's key
                            body_seconds=float(os.environ.get("BODY_SECONDS", "10")))
        server = Server((os.environ.get("HOST", "127.0.0.1"), int(os.environ.get("PORT", "8080"))), shipping)
        print(f"listening on port {server.server_port}", flush=True)
        server.serve_forever()
