package drill

import "github.com/outbox-relay/outbox-relay/internal/webhook"

// Where the remedies are explained.
const (
	handler   = "docs/receiving.md#the-handler"
	modes     = "docs/receiving.md#which-mode"
	answering = "docs/receiving.md#errors-say-what-happens-next"
	order     = "docs/receiving.md#order"
	memory    = "docs/receiving.md#what-is-remembered-and-for-how-long"
	steps     = "docs/receiving-elsewhere.md#what-a-receiver-does"
	columns   = "docs/receiving-elsewhere.md#the-table"
	mistakes  = "docs/receiving-elsewhere.md#mistakes-that-other-stacks-make-easy"
	leftOut   = "docs/receiving-elsewhere.md#what-these-receivers-leave-out"
	verifying = "docs/wire.md#verifying"
)

const (
	oneTransaction = "Insert the key into a table with a primary key, in the same transaction as the effect, before it, and answer after the commit."
	wholeKey       = "Remember X-Idempotency-Key as it is, all of its up to 255 characters, and nothing else of the event."
	verifyFirst    = "Verify the signature x1 before anything else, refuse with 401 what does not match, and let no setting or missing header skip it."
	withinMinutes  = "Refuse timestamps more than five minutes from your clock, in either direction, and those that are no number of seconds."
	rawBody        = "Read the body as bytes, up to the limit, verify these bytes, and parse them afterwards."
)

// table has every check, in the order in which they are made.
var table = [...]Check{
	{"valid", "a valid event", "2xx within the relay's timeout, and one effect", "Let it handle the type, commit, and answer 2xx in good time; what takes longer belongs behind an inbox.", handler, usual, valid},
	{"after-commit", "20 events, each looked for the moment its answer comes", "the effect is there before the answer, or the answer is 202", "Answer after the commit. Where the work is done later, record the event in the database first, and answer 202.", modes, needsProbe, afterCommit},

	{"duplicate", "an event twice, as after a lost answer: other attempt, delivery id and timestamp", "2xx twice, and one effect", oneTransaction + " Answer a duplicate as the first time.", handler, usual, repeated(func(e event) event { return e })},
	{"at-once", "five events, each 20 times at once", "one effect each; 2xx, 409 or 503, and then 2xx", oneTransaction + " Who finds the key taken by a transaction under way answers 409.", steps, usual, atOnce},
	{"cut-before-answer", "events whose connection is cut after the request, and which then come again", "one effect each", oneTransaction + " Two transactions, whichever comes first, lose an effect or repeat it when the process or the client goes between them.", modes, usual, cutBeforeAnswer},
	{"replay", "a known event with X-Outbox-Replay: true", "2xx, and one effect", "A replay is a duplicate like any other, if the event is known.", memory, usual, repeated(func(e event) event { return e.covering(set(webhook.Replay, "true")) })},
	{"key-reused", "a known key with another body", "422, and one effect", "Keep a hash of the body beside the key, and answer 422 if it differs. The key alone decides what a duplicate is.", steps, usual, keyReused},
	{"same-content", "two events with equal bodies", "two effects, or a refusal", wholeKey, columns, needsProbe, sameContent},
	{"same-event-id", "two events with one X-Outbox-Event-Id, as of two outboxes", "two effects", wholeKey, columns, needsProbe, apart(sameEventID)},
	{"key-case", "two keys that differ in upper and lower case", "two effects", wholeKey + " Compare it byte by byte.", columns, needsProbe, apart(keyCase)},
	{"key-long", "two keys of 255 characters that differ in the last", "two effects", wholeKey, columns, needsProbe, apart(keyLong)},
	{"key-odd", "keys with %41, +, quotes and a backslash beside their decoded twins", "an effect each", wholeKey + " Decode nothing in it.", columns, needsProbe, apart(keyOdd)},
	{"key-utf8", "keys that are not ASCII, which no relay sends", "4xx", "Answer 400 to a key that is not 1 to 255 printable ASCII characters, before the database refuses it.", verifying, usual, keyUTF8},
	{"key-blanks", "a duplicate with blanks around its key", "2xx, and one effect", "Remove blanks and tabs around X-Idempotency-Key before you use it: the signature covers it without them.", mistakes, usual, keyBlanks},

	{"unsigned", "events without a signature", "401, and no effect", verifyFirst, steps, usual, forged(unsigned)},
	{"wrong-secret", "an event signed with another secret", "401, and no effect", verifyFirst, steps, usual, forged(wrongSecret)},
	{"retired-secret", "an event signed with a secret that was taken back", "401, and no effect", "Remove the old secret from the receiver when the relay no longer signs with it.", verifying, usual, forged(retiredSecret)},
	{"cut-signature", "signatures that are empty, cut, or no base64", "401, and no effect", "Compare the whole signature with the one that you compute, in constant time (hmac.compare_digest, crypto.timingSafeEqual).", verifying, usual, forged(cutSignature)},
	{"changed-body", "a signed event with another body", "401, and no effect", verifyFirst + " It covers the body.", verifying, usual, forged(changedBody)},
	{"changed-key", "a known event with another X-Idempotency-Key", "401, and no further effect", "Verify x1, which covers the key. Who verifies v1 alone deduplicates on webhook-id.", verifying, usual, changedKey},
	{"changed-header", "events with changed, added and removed headers that are signed", "401", "Verify x1, which covers all of them. Who verifies v1 alone must use none of them.", verifying, usual, changedHeader},
	{"old-timestamp", "a signed event from beyond the tolerance", "401, and no effect", withinMinutes, verifying, usual, forged(oldTimestamp)},
	{"future-timestamp", "a signed event from as far in the future", "401, and no effect", withinMinutes, verifying, usual, forged(futureTimestamp)},
	{"odd-timestamp", "signed timestamps that are negative, zero, too large, or in milliseconds", "401, and no effect", withinMinutes, verifying, usual, forged(oddTimestamp)},
	{"within-tolerance", "signed events from half the tolerance ago and ahead", "2xx, and one effect each", "Tolerate five minutes, or clocks that drift stop deliveries.", verifying, usual, fine(withinTolerance)},
	{"other-signatures", "events with a second secret's signatures and ones of unknown versions around the right one", "2xx, and one effect each", "Try every signature in webhook-signature that begins with x1 (or v1), and pass over the others: while secrets rotate there are several.", verifying, usual, fine(otherSignatures)},
	{"each-secret", "events signed with each of the secrets alone", "2xx, and one effect each", "Try all secrets that you accept, not only the first.", verifying, usual, fine(eachSecret)},
	{"new-header", "events with a signed header that is new, X-Outbox or X-Event", "2xx, and one effect each", "Compute x1 over all headers of the request that begin with x-outbox-, x-event- or ce-, not over a list of those that you know.", verifying, usual, fine(newHeader)},
	{"refusal-status", "an event signed with another secret", "401, not a status at which a relay gives up", "Answer 401 to what cannot be verified.", steps, usual, refusalStatus},

	{"exact-bytes", "an event with blanks and line ends around its JSON", "2xx, and one effect", rawBody + " JSON that was parsed and written again has other bytes.", mistakes, usual, fine(exactBytes)},
	{"parsed-first", "forged events, one of which is no JSON", "the same refusal for both", rawBody, mistakes, usual, parsedFirst},
	{"not-json", "a signed event whose body is no JSON", "422 or 400, or an effect", "Answer 422 to what no repetition fixes, and 2xx only to what took effect.", answering, usual, notJSON},
	{"large-body", "an event of 1 MiB", "2xx, and one effect", "Raise the limit on bodies to what the producer sends; an outbox holds up to 1 MiB. Frameworks often stop at 100 KiB.", steps, usual, fine(largeBody)},
	{"too-large", "an event of 16 MiB", "413, and no effect", "Limit the body before it is read, to 1 MiB.", steps, usual, tooLarge},
	{"chunked", "an event in chunks, without Content-Length, as proxies send it", "2xx, and one effect", "Read the body to its end, not as many bytes as Content-Length says.", steps, usual, chunked},
	{"cut-body", "half of an event, and then the whole", "2xx, and one effect", "Remember nothing of an event before its body has arrived and is verified.", steps, usual, cutBody},
	{"slow-body", "a body of which a byte comes each second", "the receiver gives up", "Bound the time in which a body must arrive (ten seconds), or put a proxy in front that does.", leftOut, beside, slowBody},

	{"unknown-type", "a type that the receiver cannot know", "2xx or 422", "Answer 422 to types without a handler; replay them after the deploy that brings one.", answering, usual, unhandled(func(e *event) { e.typ = "unknown." + e.key })},
	{"unknown-version", "version 999 of the type", "2xx or 422", "Answer 422 to versions without a handler.", answering, usual, unhandled(func(e *event) { e.version = 999 })},
	{"reordered", "a newer event of an ordering key, and then an older one", "2xx for both", "Accept older events. Let the handler pass over what a newer event has overtaken.", order, usual, reordered},
	{"header-case", "header names in lower and in upper case", "2xx, and one effect", "Compare header names without regard to case.", steps, usual, headerCase},
	{"split-request", "a request in five pieces", "2xx, and one effect", "Read until the request is whole.", steps, usual, splitRequest},
	{"half-request", "kept connections on which half a request stalls", "others are served, and the connection is closed", "Bound the time in which headers must arrive (Go: http.Server.ReadHeaderTimeout; Node.js: headersTimeout; Python: StreamRequestHandler.timeout), or put a proxy in front that does.", leftOut, beside, halfRequest},

	{"under-load", "200 events a second for three seconds, every tenth twice", "2xx, 409, 429 or 503, and one effect each", "Let requests wait for a connection of the pool, answer 503 with Retry-After beyond that, and 2xx only after the commit.", modes, usual, underLoad},
	{"late-duplicate", "the very first event once more", "2xx, and one effect", "Remember keys in the database, until X-Outbox-Not-After at least: a relay repeats an event for weeks.", memory, usual, lateDuplicate},
	{"still-well", "one more valid event", "2xx, and one effect", "Give back connections and transactions after every request, above all after one that failed.", handler, usual, fine(oneMore)},
}
