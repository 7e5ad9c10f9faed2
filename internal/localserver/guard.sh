# Runs a server until its input ends, which the end of the process that started it brings about, however that ends. Then
# the server is killed, and its directory is removed unless the last word was to keep it.
#
#   guard DIR COMMAND...
dir=$1
shift
exec 3<&0
"$@" 3<&- </dev/null &
server=$!
{
	word=
	read -r word <&3
	kill -KILL "$server" 2>/dev/null
	if [ "$word" != keep ]; then
		# A process that was just killed may still be writing.
		tries=0
		until rm -rf "$dir" 2>/dev/null || [ "$tries" -ge 100 ]; do
			tries=$((tries + 1))
			sleep 0.05
		done
	fi
} >/dev/null 2>&1 &
wait "$server"
