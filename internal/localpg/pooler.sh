# pooler.sh DIR PROGRAM [line of its configuration]...
#
# Owns one PgBouncer. Makes DIR, then answers each line on stdin with one line on stdout. At end of input, however its owner
# came to close the pipe, it stops PgBouncer and removes DIR.

trap '' INT TERM HUP QUIT PIPE

dir=$1 program=$2 pid=
shift 2

umask 077
why=$(mkdir "$dir" 2>&1) || { echo "$why"; exit 1; }
echo '"postgres" ""' >"$dir/users"
printf '%s\n' "$@" >"$dir/ini"

alive() {
	sleep 0.02
	[ -n "$pid" ] && kill -0 "$pid" 2>/dev/null
}

echo ok
while read -r verb; do
	case $verb in
	start)
		"$program" "$dir/ini" >>"$dir/log" 2>&1 </dev/null &
		pid=$!
		while alive && [ ! -S "$dir/.s.PGSQL.6432" ]; do :; done
		alive && echo up || echo "down: $(tail -n 3 "$dir/log" | tr "\n" " ")"
		;;
	kill)
		kill -s KILL "$pid" 2>/dev/null
		while alive; do :; done
		rm -f "$dir"/.s.PGSQL.6432
		echo ok
		;;
	esac
done

kill -s KILL "$pid" 2>/dev/null
while alive; do :; done
rm -rf "$dir"
