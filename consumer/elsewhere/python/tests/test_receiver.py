"""Tests of what needs no PostgreSQL; `make test-elsewhere` of outbox-relay tests the rest."""
import base64, hashlib, hmac, time, unittest

from outbox_relay_receiver import Problem, event_of, parse_secrets, precheck, verify

SECRETS = [bytes([1]) * 24, bytes([7]) * 32]


def signed(body, **change):
    header = {
        "webhook-id": ["k1"], "webhook-timestamp": [str(int(time.time()))], "x-idempotency-key": ["k1"],
        "x-outbox-event-type": ["invoice.created"], "x-outbox-created-at": ["2026-01-02T03:04:05Z"], "x-outbox-delivery-id": ["7-other-9"],
        "x-outbox-destination": ["logistics-1"], "x-event-tenant": ["a"], "ce-type": ["invoice.created"], "content-type": ["application/json"],
    }
    header.update({name.replace("_", "-"): [value] for name, value in change.items()})
    lines = "".join(f"{name}:{header[name][0]}\n" for name in sorted(header) if name.startswith(("x-", "ce-")))
    text = f"x1\n{header['webhook-id'][0]}\n{header['webhook-timestamp'][0]}\n{lines}\n".encode() + body
    header["webhook-signature"] = ["v1,AAAA x1," + base64.b64encode(hmac.new(SECRETS[1], text, hashlib.sha256).digest()).decode()]
    return header


class ReceiverTest(unittest.TestCase):
    def refused(self, status, name, call, *args):
        with self.assertRaises(Problem) as refusal:
            call(*args)
        self.assertEqual((refusal.exception.status, refusal.exception.name), (status, name))

    def test_signed_request_is_an_event(self):
        header = signed(b"{}")
        precheck(header)
        verify(SECRETS, header, b"{}")
        event = event_of(header)
        self.assertEqual((event["idempotency_key"], event["type"], event["version"], event["destination"], event["not_after"]),
                         ("k1", "invoice.created", 1, "logistics-1", None))

    def test_changed_requests_are_refused(self):
        header = signed(b"{}")
        self.refused(401, "signature-invalid", verify, SECRETS, header, b"[]")
        self.refused(401, "signature-invalid", verify, SECRETS[:1], header, b"{}")
        for name in ("x-outbox-event-type", "x-outbox-destination", "x-event-tenant", "x-event-role", "ce-type", "ce-id"):
            self.refused(401, "signature-invalid", verify, SECRETS, {**header, name: ["other"]}, b"{}")

    def test_what_no_body_can_make_valid_is_refused_first(self):
        self.refused(401, "timestamp-out-of-tolerance", precheck, signed(b"", webhook_timestamp="1"))
        self.refused(400, "key-missing", precheck, {})
        self.refused(400, "header-invalid", event_of, signed(b"", x_outbox_created_at="yesterday"))

    def test_secrets_are_checked(self):
        self.assertEqual(parse_secrets(", ".join("whsec_" + base64.b64encode(secret).decode() for secret in SECRETS)), SECRETS)
        with self.assertRaises(ValueError):
            parse_secrets("whsec_AAAA")


if __name__ == "__main__":
    unittest.main()
