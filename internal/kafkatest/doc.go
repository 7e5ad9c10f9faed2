// Package kafkatest tests package kafkapost, and the relay with it, against kfake, franz-go's imitation of a broker, in a process of its own. It is
// a module of its own, so that the relay's does not need the imitation.
package kafkatest
