//go:build race

package post

// raceDetector says that pools are emptied at random, so that allocations vary.
const raceDetector = true
