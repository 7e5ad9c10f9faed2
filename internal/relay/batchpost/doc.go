// Package batchpost groups the attempts of one destination that wait at the same time, so that one
// request carries them, and keeps what is known of whether its receiver takes such batches. What a
// request is, and how it travels, is package post's.
package batchpost
