#!/bin/sh
# Checks delivery.pml exhaustively, and that it finds each planted bug. A model that finds none of them would prove nothing.
set -eu
cd "$(dirname "$0")"
command -v spin >/dev/null || { echo 'install Spin first: apt-get install spin' >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp delivery.pml "$work"
cd "$work"

# check searches all states of the model with the given definitions, and fails unless the search was complete or found an error.
check() {
	spin "$@" -a delivery.pml >spin.log || { cat spin.log >&2; exit 1; }
	gcc $optimize -DSAFETY -DCOLLAPSE -DVECTORSZ=2048 -DMEMLIM=2000 -w -o pan pan.c
	./pan -m100000 >pan.log
	grep -q '^State-vector' pan.log && ! grep -Eq 'max search depth too small|out of memory|reached -DMEMLIM' pan.log || { cat pan.log >&2; exit 1; }
}

holds() {
	optimize=-O1
	check "$@"
	grep -q 'errors: 0' pan.log || { cat pan.log >&2; echo "the model does not hold: $*" >&2; exit 1; }
	echo "holds: $* $(sed -n 's/^ *\([0-9]*\) states, stored.*/\1 states/p; s/^ *\([0-9]*\) transitions.*/\1 transitions/p' pan.log | paste -sd, -)"
}

# finds fails unless the named part of an assertion was violated.
finds() {
	optimize=-O0 # the search is short
	assertion=$1
	shift
	check "$@"
	grep -q 'errors: 1' pan.log || { echo "the planted bug was not found: $*" >&2; exit 1; }
	grep 'assertion violated' pan.log | grep -qF -- "$assertion" || { cat pan.log >&2; echo "another assertion was violated than $assertion: $*" >&2; exit 1; }
	echo "finds: $* $(grep -E 'assertion violated' pan.log | head -n 1)"
}

holds -DCRASHES=2 -DLOSSES=0 -DFREEZES=0
holds -DCRASHES=1 -DLOSSES=1 -DFREEZES=0
holds -DCRASHES=0 -DLOSSES=1 -DFREEZES=1
no_effect='||(effects[e]==1))' second_effect='violated (effects[e]==1)' stale_write='(granted[e]==grants[e])' undelivered='((place[0]=='
finds "$no_effect" -DCRASHES=1 -DLOSSES=0 -DFREEZES=0 -DMARK_BEFORE_POST
finds "$no_effect" -DCRASHES=1 -DLOSSES=0 -DFREEZES=0 -DANSWER_BEFORE_COMMIT
finds "$second_effect" -DCRASHES=1 -DLOSSES=0 -DFREEZES=0 -DTWO_TRANSACTIONS
finds "$undelivered" -DCRASHES=1 -DLOSSES=0 -DFREEZES=0 -DNO_RESCUE
finds "$undelivered" -DCRASHES=0 -DLOSSES=0 -DFREEZES=0 -DCURSOR
finds "$stale_write" -DCRASHES=0 -DLOSSES=1 -DFREEZES=1 -DNO_FENCE
finds "$stale_write" -DCRASHES=0 -DLOSSES=1 -DFREEZES=1 -DRESCUE_KEEPS_FENCE
