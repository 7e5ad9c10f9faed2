package guard

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"time"
)

const (
	// knownCookie tells clients that have given a right token before from others at their address,
	// such as a proxy's. It gives no access: who guesses tokens, or sends wrong ones on purpose,
	// only does not slow them.
	knownCookie = "outbox_relay_known"
	knownFor    = 90 * 24 * time.Hour
)

// The roles of tokens. Each has one cookie, or else who has a read token could ask for one cookie
// for each guess.
var knownRoles = [...]string{"administrators", "readers"}

// knownAs returns the role whose cookie a request has; empty: it has none.
func (c Config) knownAs(r *http.Request) string {
	cookie, err := r.Cookie(knownCookie)
	if err != nil {
		return ""
	}
	for _, role := range knownRoles {
		if hmac.Equal([]byte(cookie.Value), []byte(c.proof(role))) {
			return role
		}
	}
	return ""
}

// remember gives a client that has sent a right token the cookie of its role.
func (c Config) remember(w http.ResponseWriter, caller Caller) {
	role := knownRoles[1]
	if caller.MayChange {
		role = knownRoles[0]
	}
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // G124: without TLS the cookie travels as the token does
		Name: knownCookie, Value: c.proof(role), Path: "/", MaxAge: int(knownFor / time.Second),
		HttpOnly: true, Secure: c.TLS || c.BehindProxy, SameSite: http.SameSiteLaxMode,
	})
}

// proof is valid until a token changes, also after a restart and at other relays.
func (c Config) proof(role string) string {
	key := sha256.Sum256([]byte("outbox-relay known client\x00" + string(c.Token) + "\x00" + string(c.ReadToken)))
	mac := hmac.New(sha256.New, key[:])
	mac.Write([]byte(role))
	return hex.EncodeToString(mac.Sum(nil))
}
