module github.com/outbox-relay/outbox-relay/internal/kafkatest

go 1.26.0

require (
	github.com/outbox-relay/outbox-relay v0.0.0
	github.com/twmb/franz-go v1.22.2
	github.com/twmb/franz-go/pkg/kfake v0.0.0-20260918054303-01f206a7e32c
	github.com/twmb/franz-go/pkg/kmsg v1.15.0
)

require (
	code.dny.dev/ssrf v0.3.0 // indirect
	github.com/klauspost/compress v1.20.3 // indirect
	github.com/pierrec/lz4/v4 v4.1.33 // indirect
	golang.org/x/time v0.16.0 // indirect
)

replace github.com/outbox-relay/outbox-relay => ../..
