# janitor.sh DIR BINDIR [postgres option]...
#
# Owns one throwaway PostgreSQL. Makes DIR, then answers each line on stdin with
# one line on stdout; at end of input, however its owner came to close the pipe,
# it stops PostgreSQL and removes DIR.

# Ignored signals stay ignored in children; initdb and postgres set their own
# handlers. PIPE, because a reply to a dead owner must not kill the janitor.
trap '' INT TERM HUP QUIT PIPE

dir=$1 bin=$2 pid=
shift 2

# The pause is also what lets the shell reap a child that ended: without it,
# kill -0 keeps finding the zombie.
alive() {
	sleep 0.02
	[ -n "$pid" ] && kill -0 "$pid" 2>/dev/null
}

umask 077
why=$(mkdir "$dir" 2>&1) || { echo "$why"; exit 1; }
echo ok

while read -r verb arg addr; do
	case $verb in
	init)
		"$bin/initdb" -D "$dir/data" -U postgres --auth-local=trust --auth-host="${arg:-trust}" --encoding=UTF8 --locale=C \
			--no-sync --no-instructions >>"$dir/log" 2>&1 </dev/null && echo ok || echo failed
		;;
	copy)
		cp -Rp "$arg" "$dir/data" >>"$dir/log" 2>&1 && rm -f "$dir/data/postmaster.pid" && echo ok || echo failed
		;;
	start)
		"$bin/postgres" -D "$dir/data" "$@" -k "$dir" -p "$arg" -c "listen_addresses=$addr" \
			>>"$dir/log" 2>&1 </dev/null &
		pid=$!
		echo "$pid"
		;;
	signal)
		alive && kill -s "$arg" "$pid"
		echo ok
		;;
	poll)
		alive && echo up || echo down
		;;
	esac
done

# Immediate rather than fast: a checkpoint of data that is about to be removed
# is wasted. PostgreSQL gives its own children 5 s before it kills them.
signal=QUIT ticks=0
while alive; do
	# Repeated, because a server that was started a moment ago still ignores it.
	[ $((ticks % 50)) -eq 0 ] && kill -s "$signal" "$pid" 2>/dev/null
	ticks=$((ticks + 1))
	[ "$ticks" -eq 500 ] && signal=KILL
done

# A backend orphaned by KILL may still be writing while it finds out.
tries=0
until rm -rf "$dir" 2>/dev/null || [ "$tries" -ge 100 ]; do
	tries=$((tries + 1))
	sleep 0.05
done
