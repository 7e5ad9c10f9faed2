package main

import (
	"bytes"
	"context"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The payload of event n is {"n":1,"pad":"…"} in every system. River makes it of riverArgs.

// payloadSQL is the payload of event i in a statement whose fourth parameter is the padding.
const payloadSQL = `('{"n":' || i || ',"pad":"' || $4 || '"}')::json`

// payloadText returns the payload of event n.
func payloadText(n int, padding string) string {
	return `{"n":` + strconv.Itoa(n) + `,"pad":"` + padding + `"}`
}

// padding returns what makes a payload about so many bytes long.
func padding(bytes int) string { return strings.Repeat("x", max(0, bytes-20)) }

const numberField = `"n":`

// eventNumber finds the number of an event in its payload, whatever order a database gave its
// fields; -1: it has none.
func eventNumber(body []byte) int {
	at := bytes.Index(body, []byte(numberField))
	if at < 0 {
		return -1
	}
	digits := bytes.TrimLeft(body[at+len(numberField):], " ")
	end := 0
	for end < len(digits) && digits[end] >= '0' && digits[end] <= '9' {
		end++
	}
	n, err := strconv.Atoi(string(digits[:end]))
	if err != nil {
		return -1
	}
	return n
}

// insertBy returns what commits event n by a statement that takes its payload and its key.
func insertBy(statement string, pool *pgxpool.Pool, l load) func(ctx context.Context, n int) error {
	pad := padding(l.payload)
	return func(ctx context.Context, n int) error {
		_, err := pool.Exec(ctx, statement, payloadText(n, pad), "k-"+strconv.Itoa(n))
		return err
	}
}
