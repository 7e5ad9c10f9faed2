// Package mutants plants bugs in the product, one at a time, and checks that an existing test
// catches each: the test passes without the bug, and with it says what the table wants. A go test
// -overlay puts a changed copy in the place of one source file, so that the tree stays as it is.
//
//	make mutants                                                        all, some minutes
//	go test ./internal/mutants -run TestMutants/late -v -args -mutants  some
//
// Without -mutants the test only checks that the texts to be replaced still stand in the source,
// once each.
//
//	planted bug                                  caught by
//	delivered is written before the POST         relay: TestRetryThenSuccess
//	a lease need not outlast the timeout         relay: TestEveryMistakeIsFound
//	receiver answers before commit               consumer: TestFailedCommitIsNeverAnsweredAsSuccess
//	dedupe by a plain insert                     consumer: TestFirstThenDuplicate
//	no fence in the settle of a row              internal/relay/settle: TestStaleSettlementsChangeNothing
//	no fence in the settle of a range            internal/relay/intake: TestSettleStale
//	redirects are followed                       internal/relay/post: TestRedirectsAreNeverFollowed
//	net http may send the body again             internal/relay/post: TestRequestIsTheWireContract
//	a backoff instead of the schedule            internal/relay/policy: TestDelayFollowsTheScheduleAndTheLastRepeats
//	breaker burns attempts                       internal/relay/policy: TestDestinationAtFaultSpendsNoAttempt
//	late commits are lost                        internal/relay/intake: TestTakeLateCommits
//	a lost notification is not made up for       relay: TestLostNotificationIsMadeUpFor
//	two relays take one key                      internal/relay/intake: TestKeysStay
//	a rescued range keeps its fence              internal/relay/intake: TestRescue
//	a header is left out of the signature        internal/relay/post: TestRequestIsTheWireContract
//	event headers are left out of the signature  internal/relay/post: TestSecurityOwnHeadersAreSigned
//	a receiver believes unsigned headers         internal/webhook: TestX1BindsTheHeaders
//	a replay is left out of the signature        internal/relay/post: TestReplayIsSigned
//	prune ignores the retention                  consumer/internal/memory: TestPruneAnnouncesBeforeItRemoves
//	prune ignores until when duplicates may come consumer/internal/memory: TestPruneKeepsWhatIsStillNeeded
//	a living relay is rescued                    internal/relay/session: TestRelayThatComesBackDuringItsRescue
//	the range of a living relay is taken over    internal/relay/intake: TestRescue
package mutants
