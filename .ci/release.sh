#!/bin/sh
# Builds the release of a version whose tag is at HEAD, into bin/release/VERSION: release.sh v1.2.3
# It publishes nothing, and needs no network, registry or container engine: docs/deploy/release.md.
# goreleaser refuses a tree with changes and a tag at another commit. A run that fails leaves no
# release behind.
set -eu
cd "$(dirname "$0")/.."
version=$1 dist=bin/dist input=bin/release-input
fail() { printf 'release: %s\n' "$*" >&2; exit 1; }
command -v jq >/dev/null || fail 'install jq first: apt-get install jq'

# The tag of an image cannot hold the "+" of build metadata.
number='(0|[1-9][0-9]*)'
printf '%s\n' "$version" | grep -Eqx "v$number\.$number\.$number(-[0-9A-Za-z]+([.-][0-9A-Za-z]+)*)?" ||
	fail "the version \"$version\" is not semantic: write it as v1.2.3, or v1.2.3-rc.1 before a release"
notes=$(awk -v version="${version#v}" '
	/^## / {
		name = $2; gsub(/[][]/, "", name); sub(/^v/, "", name)
		inside = name == version && / \(?[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]\)? *$/
		next
	}
	inside' CHANGELOG.md | sed '/[^[:space:]]/,$!d')
[ -n "$notes" ] ||
	fail "CHANGELOG.md says nothing below a heading \"## $version - 2006-01-02\": rename its heading Unreleased, and commit it"
commit=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
RELEASE_TIME=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
export SOURCE_DATE_EPOCH RELEASE_TIME GORELEASER_CURRENT_TAG="$version"
# goreleaser gives its commands no variables but those of .goreleaser.yaml.
GOCACHE=$(go env GOCACHE) GOMODCACHE=$(go env GOMODCACHE)
export GOCACHE GOMODCACHE

# What goreleaser packs and git does not have.
rm -rf $dist $input
mkdir -p $input/archive/man $input/archive/completions $input/roots/etc/ssl/certs
go build -o $input/outbox-relay ./cmd/outbox-relay
$input/outbox-relay man >$input/archive/man/outbox-relay.1
for shell in bash zsh fish; do
	$input/outbox-relay completion $shell >$input/archive/completions/outbox-relay.$shell
done
sh .ci/licences.sh check
for os in linux darwin; do
	GOOS=$os CGO_ENABLED=0 sh .ci/licences.sh save $input/licences-$os
	mkdir -p $input/licences
	cp -R $input/licences-$os/. $input/licences
done
cp "$(go env GOROOT)/LICENSE" $input/licences/Go.LICENSE
cp internal/admin/page/static/vendor/*.LICENSE $input/licences
line=$(printf '%080d' 0 | tr 0 =)
(cd $input/licences && find . -type f | LC_ALL=C sort | while read -r name; do
	printf '%s\n%s\n%s\n\n%s\n\n' "$line" "${name#./}" "$line" "$(cat "$name")"
done) >$input/archive/THIRD-PARTY-LICENSES.txt
cp -R docs/deploy/helm/outbox-relay $input/chart
sed "s/^version: .*/version: ${version#v}/; s/^appVersion: .*/appVersion: $version/" \
	docs/deploy/helm/outbox-relay/Chart.yaml >$input/chart/Chart.yaml
go run -C cmd/roots . >$input/roots/etc/ssl/certs/ca-certificates.crt

"$GORELEASER" release --clean --skip=publish

# A build that sets a variable which the program no longer has succeeds. Its binary has no version.
binary=$(jq -r --arg os "$(go env GOHOSTOS)" --arg arch "$(go env GOHOSTARCH)" \
	'.[] | select(.type == "Binary" and .goos == $os and .goarch == $arch) | .path' $dist/artifacts.json)
"$binary" version --json | jq -e --arg version "$version" --arg commit "$commit" \
	'.version == $version and .commit == $commit' >/dev/null || fail "$binary does not say that it is $version of $commit"

mkdir $dist/release
digest=$(sh .ci/image.sh "$version" "$commit" $dist/release/outbox-relay-"$version"-image.oci.tar)
cp $dist/outbox-relay-* $dist/release
cat >$dist/release/RELEASE_NOTES.md <<EOF
$notes

Built by $(go env GOVERSION) from commit $commit with \`SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH\`; the same commit, Go and time give the same bytes. \`sha256sum --check SHA256SUMS\` compares the files, \`docs/deploy/release.md\` says what each one is, and the digest of the image is \`$digest\`.
EOF
(cd $dist/release && sha256sum -- * >../SHA256SUMS && mv ../SHA256SUMS .)
rm -rf "bin/release/$version"
mkdir -p bin/release
mv $dist/release "bin/release/$version"
echo "$version is in bin/release/$version; docs/deploy/release.md says how to publish it"
