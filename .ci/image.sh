#!/bin/sh
# Writes the image of a release as an OCI layout and prints its digest: image.sh VERSION COMMIT FILE
# oras ($ORAS) makes it from the layers that goreleaser has packed, to start as the Dockerfile says.
# crane and skopeo copy it into registries.
set -eu
version=$1 commit=$2 file=$PWD/$3
instruction() { sed -n "s/^$1 //p" Dockerfile | tail -n 1; } # of the last stage
user=$(instruction USER) entrypoint=$(instruction ENTRYPOINT) cmd=$(instruction CMD) health=$(instruction HEALTHCHECK)
cd bin/dist

prefix=org.opencontainers.image
set -- "$prefix.title=outbox-relay" "$prefix.description=Delivers the events that a service commits to its outbox table" \
	"$prefix.version=$version" "$prefix.revision=$commit" "$prefix.created=$RELEASE_TIME" \
	"$prefix.source=https://github.com/outbox-relay/outbox-relay" "$prefix.licenses=MIT"
labels=$(printf '%s\n' "$@" | jq -Rn '[inputs | capture("(?<key>[^=]*)=(?<value>.*)")] | from_entries')
for annotation; do
	shift
	set -- "$@" --annotation "$annotation"
done

diff_id() { printf 'sha256:%s' "$(gunzip -c "$1" | sha256sum | cut -d ' ' -f 1)"; }
for arch in amd64 arm64; do
	jq -en --arg arch $arch --arg time "$RELEASE_TIME" --argjson labels "$labels" --arg user "$user" --argjson entrypoint "$entrypoint" \
		--argjson cmd "$cmd" --arg health "$health" --arg roots "$(diff_id layer-roots.tar.gz)" --arg relay "$(diff_id layer-$arch.tar.gz)" '
		def nanoseconds: tonumber * 1e9;
		{
			created: $time, architecture: $arch, os: "linux",
			config: {
				User: $user, WorkingDir: "/", Env: ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
				Entrypoint: $entrypoint, Cmd: $cmd, Labels: $labels,
				Healthcheck: ($health | capture("--interval=(?<i>\\d+)s --timeout=(?<t>\\d+)s --start-period=(?<s>\\d+)s CMD (?<c>.*)") | {
					Test: (["CMD"] + (.c | fromjson)),
					Interval: (.i | nanoseconds), Timeout: (.t | nanoseconds), StartPeriod: (.s | nanoseconds)
				})
			},
			rootfs: {type: "layers", diff_ids: [$roots, $relay]},
			history: [{created: $time, created_by: "COPY /etc/ssl/certs/ca-certificates.crt"}, {created: $time, created_by: "COPY /outbox-relay"}]
		}' >config-$arch.json
	type=application/vnd.oci.image
	"$ORAS" push --no-tty --oci-layout image:$arch --config config-$arch.json:$type.config.v1+json "$@" \
		layer-roots.tar.gz:$type.layer.v1.tar+gzip layer-$arch.tar.gz:$type.layer.v1.tar+gzip >&2
done
"$ORAS" manifest index create --oci-layout "image:$version" amd64 arm64 "$@" >&2
# Programs that read a layout expect one image in it, and find the platforms by its index.
jq -c --arg version "$version" '.manifests |= map(select(.annotations["org.opencontainers.image.ref.name"] == $version))' image/index.json >index.json
mv index.json image/index.json
tar --create --file "$file" --directory image --sort=name --format=ustar --mtime="@$SOURCE_DATE_EPOCH" \
	--owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX blobs index.json oci-layout
jq -r '.manifests[0].digest' image/index.json
