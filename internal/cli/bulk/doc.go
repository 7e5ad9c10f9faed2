// Package bulk changes many rows at an operator's word, in the outbox and in an inbox alike: flags
// that choose them, the question, the work in batches, what is printed, and the audit line.
package bulk
