# docker build -t outbox-relay .                     the relay alone: one static binary, no shell, no root; make release builds the same without Docker
# docker build -t outbox-relay-demo --target demo .  the sample receiver of docker-compose.yml

# The digest is what is built with; the tag says what it was. It names the image of every platform.
FROM --platform=$BUILDPLATFORM golang:1.26@sha256:3aff6657219a4d9c14e27fb1d8976c49c29fddb70ba835014f477e1c70636647 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETOS
ARG TARGETARCH
ARG VERSION
ARG COMMIT
ENV CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH
RUN go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$VERSION -X main.commit=$COMMIT" -o /out/outbox-relay ./cmd/outbox-relay
RUN go build -trimpath -buildvcs=false -ldflags "-s -w" -o /out/demo ./cmd/demo
# The authorities come from a module in go.sum, and not from the base image: those of a release are the same. This program runs here, so for this platform.
RUN GOOS= GOARCH= go run -C cmd/roots . >/out/ca-certificates.crt

FROM scratch AS demo
COPY --from=build /out/demo /demo
USER 65532:65532
ENTRYPOINT ["/demo"]

FROM scratch AS relay
COPY --from=build /out/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/outbox-relay /outbox-relay
USER 65532:65532
# Says whether this relay's heartbeat reaches the database. It is no reason for a restart: a relay outlives its database.
HEALTHCHECK --interval=10s --timeout=6s --start-period=15s CMD ["/outbox-relay", "status", "--healthcheck"]
ENTRYPOINT ["/outbox-relay"]
CMD ["run"]
