/* How an event reaches its effect once: relays, receivers, crashes. README.md maps each step to the code. */

#ifndef EVENTS
#define EVENTS 2  /* 1 or 2 */
#endif
#ifndef RELAYS
#define RELAYS 2
#endif
#ifndef CRASHES
#define CRASHES 2  /* of relays and of receivers together */
#endif
#ifndef LOSSES
#define LOSSES 1   /* answers of takes, requests and answers that are lost, handlers that fail */
#endif
#ifndef FREEZES
#define FREEZES 1  /* living relays that are taken for dead */
#endif
#define WORKERS 2  /* requests that receivers work at the same time */
#define NUMBERS 8  /* more than RELAYS + CRASHES + FREEZES */

/* Where an event is. */
#define NEW 0        /* no relay has taken it */
#define RANGE 1      /* in an open range */
#define ROW 2        /* a pending delivery */
#define DELIVERED 3

/* Answers. */
#define NONE 0
#define OK 1
#define ERROR 2

bool committed[EVENTS];      /* the producer's transaction */
byte place[EVENTS];
byte owner[EVENTS];          /* the relay that has the range or the claim; 0: none */
byte fence[EVENTS];
bool registered[NUMBERS];    /* outbox_relay */
bool connected[NUMBERS];     /* the process of the relay lives */

bool processed[EVENTS];      /* processed_events */
byte effects[EVENTS];
bool locked[EVENTS];         /* the key's lock in the receiver's database */

byte crashes = CRASHES, losses = LOSSES, freezes = FREEZES;

byte request[WORKERS];  /* the event that a receiver works, plus 1; 0: none */
byte client[WORKERS];   /* the relay that waits for its answer, plus 1; 0: the connection is closed */
byte answer[RELAYS];

byte grants[EVENTS];    /* for the check alone: how often the database gave the event to a relay */
byte highest;           /* for a planted bug: the last event that a take has found */

/* An answer reaches its relay only if this still waits for it. */
inline reply(what) {
	if
	:: client[w] != 0 -> answer[client[w] - 1] = what; client[w] = 0
	:: else
	fi
}

inline finish() { request[w] = 0; client[w] = 0 }

inline hang_up() {
	if
	:: client[0] == r + 1 -> client[0] = 0
	:: client[1] == r + 1 -> client[1] = 0
	:: else
	fi
}

inline give(e) {
	fence[e]++;
	owner[e] = me;
	grants[e]++;
	hand[e] = fence[e];
	granted[e] = grants[e]
}

inline rescued(e) {
#ifdef RESCUE_KEEPS_FENCE
	owner[e] = me;
	grants[e]++;
	hand[e] = fence[e];
	granted[e] = grants[e]
#else
	give(e)
#endif
}

inline drop(e) { hand[e] = 0; granted[e] = 0 }

/* Whether a settle finds its claim. A range is also found by its relay. */
#ifdef NO_FENCE
#define mine(e) true
#else
#define mine(e) (fence[e] == hand[e] && place[e] != DELIVERED && (place[e] == ROW || owner[e] == me))
#endif

/* Writes where the event is from now on. It is a no-op under a stale fence. */
inline settle(e, to, who) {
	if
	:: mine(e) ->
		assert(place[e] != DELIVERED);         /* delivered is final */
		assert(granted[e] == grants[e]);       /* no stale write: no other relay has it since */
		assert(to != DELIVERED || effects[e] == 1);  /* what is marked delivered has had its effect */
		place[e] = to;
		owner[e] = who
	:: else
	fi
}

inline rows(e) {
	settle(e, ROW, me);
	if
	:: mine(e)
	:: else -> drop(e)
	fi
}

/* Numbers of relays come again only when nothing names them any more. */
#define vacant(i) (!registered[i] && !connected[i] && owner[0] != i && owner[EVENTS - 1] != i)
inline register() {
	me = 1;
	do
	:: !vacant(me) -> me++
	:: else -> break
	od;
	registered[me] = true;
	connected[me] = true
}

#ifdef CURSOR
#define takes(e) (place[e] == NEW && committed[e] && e >= highest)
#else
#define takes(e) (place[e] == NEW && committed[e])
#endif

#define free(e) (place[e] == ROW && owner[e] == 0)
/* A range is taken over if its relay is no longer registered, or if this relay does not know that it has it. */
#define orphan(e) (place[e] == RANGE && (!registered[owner[e]] || owner[e] == me && hand[e] == 0))

proctype producer(byte e) {
	committed[e] = true
}

proctype relay(byte r) {
	byte me, e;
	byte hand[EVENTS];     /* the fences under which it has events; 0: not in hand */
	byte granted[EVENTS];  /* for the check alone */
	bool waits;            /* for an answer */

	d_step { register() }
end:	do
	:: d_step { !waits && registered[me] && (takes(0) || takes(EVENTS - 1)) ->
		e = (takes(0) -> 0 : EVENTS - 1);
		place[e] = RANGE; give(e); highest = e;
		e = 0 }
	:: d_step { !waits && registered[me] && losses > 0 && (takes(0) || takes(EVENTS - 1)) ->  /* the take's answer is lost */
		losses--;
		e = (takes(0) -> 0 : EVENTS - 1);
		place[e] = RANGE; give(e); highest = e; drop(e);
		e = 0 }
	:: d_step { !waits && registered[me] && (free(0) || free(EVENTS - 1)) ->
		e = (free(0) -> 0 : EVENTS - 1);
		rescued(e);
		e = 0 }
	:: d_step { !waits && registered[me] && (orphan(0) || orphan(EVENTS - 1)) ->
		e = (orphan(0) -> 0 : EVENTS - 1);
		rescued(e);
		e = 0 }
	/* It learns that it was taken for dead, and registers again. What it has in hand stays in hand. */
	:: d_step { !waits && !registered[me] -> connected[me] = false; register() }

	/* After a second, what is left of a range gets rows. */
	:: d_step { !waits && hand[0] != 0 && place[0] == RANGE -> rows(0) }
	:: d_step { !waits && hand[EVENTS - 1] != 0 && place[EVENTS - 1] == RANGE -> rows(EVENTS - 1) }

	/* POST. */
	:: d_step { !waits && (hand[0] != 0 || hand[EVENTS - 1] != 0) && (request[0] == 0 || request[1] == 0) ->
		e = (hand[0] != 0 -> 0 : EVENTS - 1);
		waits = true;
#ifdef MARK_BEFORE_POST
		settle(e, DELIVERED, 0);
#endif
		if
		:: request[0] == 0 -> request[0] = e + 1; client[0] = r + 1
		:: else -> request[1] = e + 1; client[1] = r + 1
		fi }
	:: d_step { !waits && losses > 0 && (hand[0] != 0 || hand[EVENTS - 1] != 0) ->  /* the request is lost */
		losses--;
		e = (hand[0] != 0 -> 0 : EVENTS - 1);
		waits = true;
#ifdef MARK_BEFORE_POST
		settle(e, DELIVERED, 0);
#endif
		answer[r] = ERROR }
	:: d_step { waits && answer[r] == NONE && losses > 0 -> losses--; hang_up(); answer[r] = ERROR }  /* the timeout ends it */

	/* The outcome. */
	:: d_step { waits && answer[r] == OK ->
#ifndef MARK_BEFORE_POST
		settle(e, DELIVERED, 0);
#endif
		drop(e); waits = false; answer[r] = NONE; e = 0 }
	:: d_step { waits && answer[r] == ERROR ->
#ifndef MARK_BEFORE_POST
		settle(e, ROW, 0);
#endif
		drop(e); waits = false; answer[r] = NONE; e = 0 }

	/* It dies, and starts again under another number. */
	:: d_step { crashes > 0 ->
		crashes--;
		hang_up();
		connected[me] = false;
		drop(0); drop(EVENTS - 1);
		waits = false; answer[r] = NONE; e = 0;
		register() }
	od
}

/* What a rescue does with the claims of a relay: it deletes the row of the relay, and voids its claims in the same statement. */
inline forget(i) {
	registered[i] = false;
	e = 0;
	do
	:: e < EVENTS ->
		if
		:: place[e] == ROW && owner[e] == i -> owner[e] = 0
		:: else
		fi;
		e++
	:: else -> break
	od;
	e = 0
}

#ifdef NO_RESCUE
#define dead(i) false
#else
#define dead(i) (registered[i] && !connected[i])
#endif
#define frozen(i) (freezes > 0 && registered[i] && connected[i])

#define RESCUE(i) \
	:: d_step { dead(i) -> forget(i) } \
	:: d_step { frozen(i) -> freezes--; forget(i) }

/* Any living relay does this. Since each that dies starts again, there is always one. */
proctype rescue() {
	byte e;
end:	do
	RESCUE(1) RESCUE(2) RESCUE(3) RESCUE(4) RESCUE(5) RESCUE(6) RESCUE(7)
	od
}

/* One request after the other. A crash ends the transaction and the connection. A request whose event another one is working is
 * answered with an error, and sent again until that one has ended: here it waits. */
proctype receiver(byte w) {
	byte e;

end:	do
	:: request[w] != 0 ->
		e = request[w] - 1;
		if
		:: d_step { processed[e] && !locked[e] -> reply(OK); finish() }  /* a duplicate */
		:: d_step { !processed[e] && !locked[e] -> locked[e] = true };
#ifdef ANSWER_BEFORE_COMMIT
			d_step { reply(OK) };
#endif
			if
			:: d_step { crashes > 0 -> crashes--; locked[e] = false; reply(ERROR); finish() }
			:: d_step { losses > 0 -> losses--; locked[e] = false; reply(ERROR); finish() }  /* the handler fails */
#ifdef TWO_TRANSACTIONS
			:: d_step { effects[e]++; assert(effects[e] == 1) };
				if
				:: d_step { crashes > 0 -> crashes--; locked[e] = false; reply(ERROR); finish() }
				:: d_step { processed[e] = true; locked[e] = false; reply(OK); finish() }
				fi
#else
			:: d_step { effects[e]++; assert(effects[e] == 1); processed[e] = true; locked[e] = false };
				if
				:: d_step { crashes > 0 -> crashes--; reply(ERROR); finish() }
				:: d_step { reply(OK); finish() }
				fi
#endif
			fi
		fi;
		e = 0
	od
}

init {
	byte i;
	atomic {
		for (i : 0 .. EVENTS - 1) { run producer(i) }
		for (i : 0 .. RELAYS - 1) { run relay(i) }
		for (i : 0 .. WORKERS - 1) { run receiver(i) }
		run rescue()
	}
	/* Progress: when nothing more can happen, all is done. Nothing can happen for ever: each repetition uses up a crash, a loss or a
	 * freeze, and the fence grows with each claim, so that a search that ends has found no endless run. */
	timeout -> assert(place[0] == DELIVERED && place[EVENTS - 1] == DELIVERED)
}
