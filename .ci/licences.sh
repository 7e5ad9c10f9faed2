#!/bin/sh
# Finds the licences of what this repository is built with, by go-licenses ($GO_LICENSES):
#   licences.sh check MODULE...  fails if one asks for more than a notice, and names it
#   licences.sh list             prints library,address,licence of the relay for GOOS and GOARCH
#   licences.sh save DIRECTORY   copies the texts of these, and the notices beside them
set -eu
cd "$(dirname "$0")/.."

# go-licenses recognises the standard library by GOROOT. The proxy, which does not exist, keeps it
# from asking the network for the addresses of licences, which nothing here needs.
export GOROOT HTTP_PROXY=http://127.0.0.1:1 HTTPS_PROXY=http://127.0.0.1:1
GOROOT=$(go env GOROOT)
go_licenses() {
	"$GO_LICENSES" "$@" --ignore github.com/outbox-relay --logtostderr=false --log_file=/dev/null --stderrthreshold=ERROR
}

allowed=0BSD,Apache-2.0,BSD-2-Clause,BSD-3-Clause,ISC,MIT

check() {
	# What ships and what others import has no exception.
	go_licenses check --allowed_licenses $allowed ./cmd/outbox-relay ./outbox ./relay ./internal/relay/... ./consumer/...
	# Under MPL-2.0: rapid, which only tests use, and River, which only `make bench` uses.
	for module; do
		(cd "$module" && go_licenses check --include_tests --allowed_licenses $allowed \
			--ignore pgregory.net/rapid --ignore github.com/riverqueue/river ./...) ||
			{ echo "licences: $module uses a module whose licence is not among $allowed" >&2; exit 1; }
	done
	echo "all licences are among $allowed"
}

case $1 in
check) shift; check "$@" ;;
list) go_licenses report ./cmd/outbox-relay ;;
save) go_licenses save --save_path "$2" ./cmd/outbox-relay ;;
esac
