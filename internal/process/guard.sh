# guard.sh COMMAND [ARG]...
#
# Runs COMMAND, tells its pid on fd 3, and sends it each signal that a line on stdin names. At the end of stdin, however
# its owner came to close the pipe, it kills COMMAND: the owner's death by SIGKILL closes it too. Its exit code is
# COMMAND's.

exec 4<&0 5>&2 2>/dev/null # a background job has no stdin of its own; the shell's own remarks are nobody's business
"$@" </dev/null 2>&5 3>&- 4<&- 5>&- &
child=$!
echo "$child" >&3
{
	while read -r signal; do
		kill -s "$signal" "$child"
	done
	kill -s KILL "$child"
} <&4 >/dev/null 3>&- 4<&- 5>&- &
watch=$!
exec 3>&- 4<&- 5>&-
wait "$child"
code=$?
kill "$watch"
exit "$code"
