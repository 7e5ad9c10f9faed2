#!/bin/sh
# Describes what a binary of the relay is made of, as CycloneDX: sbom.sh BINARY VERSION DOCUMENT
# cyclonedx-gomod ($CYCLONEDX) lists modules and hashes, go-licenses finds their licences.
# One binary has one description: it holds no time, no random number and no hash of the tools.
set -eu
setting() { go version -m "$binary" | sed -n "s/.*build[[:space:]]$1=//p"; }
binary=$1
GOOS=$(setting GOOS) GOARCH=$(setting GOARCH)
licences=$(GOOS=$GOOS GOARCH=$GOARCH CGO_ENABLED=0 sh "$(dirname "$0")/licences.sh" list)
document=$("$CYCLONEDX" bin -json -std -noserial -notimestamp -version "$2" "$binary")
printf '%s' "$document" | jq --arg licences "$licences" '
	[.components[].name] as $modules
	# A library belongs to the module with the longest path that its own begins with.
	| ($licences | split("\n") | map(split(",") | {
		licence: .[2],
		module: (.[0] as $library | [$modules[] | select(. as $path | $library + "/" | startswith($path + "/"))] | max_by(length))
	}) | group_by(.module)
	| map({key: .[0].module, value: (map(.licence) | unique | join(" AND "))})
	| from_entries + {std: "BSD-3-Clause"}) as $of
	| .components[] |= . + {licenses: [{expression: ($of[.name] // error("no licence is known of " + .name))}]}
	| del(.metadata.tools[].hashes)' >"$3"
