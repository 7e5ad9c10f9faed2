#!/bin/sh
# Releases two copies of this tree, uncommitted changes included, and compares the bytes. Reads the
# files back as their users do, and tries what must be refused: test-release.sh TOOL...
# The tools are the programs in bin that `make release` needs.
set -eu
cd "$(dirname "$0")/.."
root=$PWD version=v9.8.7 arch=$(go env GOHOSTARCH) work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_DATE='1767323045 +0000' GIT_COMMITTER_DATE='1767323045 +0000' # 2026-01-02T03:04:05Z
fail() { printf 'test-release: %s\n' "$*" >&2; exit 1; }
commit() { git add --all && git -c user.name=a -c user.email=a@example.com commit --quiet --message release; }

tree=$(export GIT_INDEX_FILE="$work/index"; git add --all && git write-tree)
copy() {
	mkdir -p "$1"
	git archive "$tree" | tar --extract --directory "$1"
	cd "$1"
	shift
	mkdir bin
	for tool; do cp "$root/$tool" bin; done
	sed -i "s/^## Unreleased\$/&\n\n## ${version#v} - 2026-01-02/" CHANGELOG.md
	git init --quiet && git remote add origin https://example.com/outbox-relay.git && commit && git tag $version
	cd "$root"
}
release() { make --no-print-directory -C "$1" release VERSION="$2"; }
# refused says whether a release fails with the given words.
refused() {
	if release "$1" "$2" >"$work/log" 2>&1; then fail "$2 is released, want: $3"; fi
	grep -qF -- "$3" "$work/log" || { cat "$work/log"; fail "$2 is refused, but not because: $3"; }
}

first=$work/first second=$work/a-longer-name/second
copy "$first" "$@"
copy "$second" "$@"
for wrong in 1.2.3 v1.2 v1.2.3+5-gabcdef v1.2.3/../../x; do
	refused "$first" $wrong "the version \"$wrong\" is not semantic"
done
refused "$first" v9.8.8 'CHANGELOG.md says nothing below a heading "## v9.8.8 - '
release "$first" $version
release "$second" $version
out=$first/bin/release/$version
diff "$out/SHA256SUMS" "$second/bin/release/$version/SHA256SUMS" || fail 'another directory gives other files'

# A file that is not committed, and a tag at another commit. The release before is still there.
echo 'package relay' >"$first/relay/forgotten.go"
refused "$first" $version 'relay/forgotten.go'
(cd "$first" && commit)
refused "$first" $version "git tag $version was not made against commit"
[ "$(cd "$out" && sha256sum --check --strict SHA256SUMS | grep -c ': OK$')" -eq 11 ] || fail 'a refused release has changed the one before it'
git -C "$first" reset --quiet --hard $version
commit=$(git -C "$first" rev-parse HEAD)

for text in '### Added' "from commit $commit with \`SOURCE_DATE_EPOCH=1767323045\`"; do
	grep -qF -- "$text" "$out/RELEASE_NOTES.md" || fail "the notes lack: $text"
done
for archive in "$out"/*.tar.gz "$out"/*.tgz "$out"/*.tar; do
	! tar --list --verbose --numeric-owner --utc --file "$archive" | grep -v ' 0/0 .* 2026-01-02 03:04 ' ||
		fail "$archive has an owner or a time of this machine"
done
for platform in linux-amd64 linux-arm64 darwin-amd64 darwin-arm64; do
	name=outbox-relay-$version-$platform
	tar --extract --file "$out/$name.tar.gz" --directory "$work"
	for file in LICENSE README.md CHANGELOG.md THIRD-PARTY-LICENSES.txt man/outbox-relay.1 docs/operations.md migrations/roles.sql \
		completions/outbox-relay.bash completions/outbox-relay.zsh completions/outbox-relay.fish migrations/outbox/00001_event.sql \
		migrations/inbox/00001_processed_events.sql deploy/outbox-relay.service deploy/prometheus-rules.yaml deploy/grafana-dashboard.json; do
		[ -s "$work/$name/$file" ] || fail "$name lacks $file"
	done
	for notice in Go.LICENSE github.com/jackc/pgx/v5/LICENSE github.com/prometheus/common/NOTICE uPlot.LICENSE htmx.LICENSE; do
		grep -qFx "$notice" "$work/$name/THIRD-PARTY-LICENSES.txt" || fail "the licences of $name lack $notice"
	done
	go version -m "$work/$name/outbox-relay" >"$work/made-of"
	for setting in CGO_ENABLED=0 -trimpath=true GOOS=${platform%-*} GOARCH=${platform#*-}; do
		grep -qF -- "$setting" "$work/made-of" || fail "$name was not built with $setting"
	done
	# The modules that Go names, and the standard library.
	jq -e --arg version $version --argjson modules "$(grep -c '^[[:space:]]dep' "$work/made-of")" '
		.bomFormat == "CycloneDX" and .metadata.component.version == $version and (.components | length) == $modules + 1
		and all(.components[]; .licenses[0].expression and (.hashes or .name == "std"))' "$out/$name.cdx.json" >/dev/null ||
		fail "$name.cdx.json does not describe the modules of the binary"
done
said="outbox-relay $version (commit $(printf '%.12s' "$commit"))"
"$work/outbox-relay-$version-linux-$arch/outbox-relay" version | grep -F "$said" || fail "the binary does not say: $said"

tar --extract --file "$out/outbox-relay-chart-$version.tgz" --directory "$work"
diff -r -x Chart.yaml docs/deploy/helm/outbox-relay "$work/outbox-relay"
grep -qx "version: ${version#v}" "$work/outbox-relay/Chart.yaml" && grep -qx "appVersion: $version" "$work/outbox-relay/Chart.yaml" ||
	fail 'the chart is of another version'

# Copying compares every digest.
mkdir "$work/image" "$work/files" "$work/docker"
tar --extract --file "$out/outbox-relay-$version-image.oci.tar" --directory "$work/image"
"$ORAS" copy --no-tty --from-oci-layout "$work/image:$version" --to-oci-layout "$work/copied:$version" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
blob() { printf '%s/image/blobs/%s' "$work" "$(jq -r "$1 | sub(\":\"; \"/\")" "$2")"; }
digest=$(jq -r '.manifests | if length == 1 then .[0].digest else error("the layout has more than one image") end' "$work/image/index.json")
grep -qF "the digest of the image is \`$digest\`" "$out/RELEASE_NOTES.md" || fail "the notes lack the digest of the image, $digest"
manifest=$(blob ".manifests[] | select(.platform == {os: \"linux\", architecture: \"$arch\"}) | .digest" "$(blob '.manifests[0].digest' "$work/image/index.json")")
jq -e '.config.User == "65532:65532" and .config.Entrypoint == ["/outbox-relay"] and .config.Cmd == ["run"]
	and .config.Healthcheck.Test[1:] == ["/outbox-relay", "status", "--healthcheck"] and .config.Healthcheck.Timeout == 6e9' \
	"$(blob .config.digest "$manifest")" >/dev/null || fail 'the image does not start as the Dockerfile says'
for number in 0 1; do
	tar --extract --file "$(blob ".layers[$number].digest" "$manifest")" --directory "$work/files"
done
"$work/files/outbox-relay" version | grep -F "$said" || fail "the binary of the image does not say: $said"

# The commands of the Dockerfile give the same files.
sed -n 's/^RUN //p' Dockerfile | grep -v -e 'mod download' -e ./cmd/demo | sed "s|/out/|$work/docker/|" >"$work/commands.sh"
(cd "$first" && CGO_ENABLED=0 GOOS=linux GOARCH=$arch VERSION=$version COMMIT=$commit sh -e "$work/commands.sh")
mkdir -p "$work/docker/etc/ssl/certs"
mv "$work/docker/ca-certificates.crt" "$work/docker/etc/ssl/certs"
diff -r "$work/files" "$work/docker" || fail 'the Dockerfile makes another image'
echo "the release was read back, and made twice with the same bytes"
