package relay

// signals wake goroutines of a relay. Each channel holds at most one token.
type signals struct {
	alerts chan struct{} // there may be alerts to send

	// For maintenance.
	parked   chan struct{} // there may be parked deliveries with a route
	reparked chan struct{} // events were parked by routes that had changed
	routes   chan struct{} // the stored routes may have changed
	schema   chan struct{} // the schema may have changed under this relay
	reloaded chan struct{} // there may be another schedule of the archive, and removed lanes to empty
}

func newSignals() *signals {
	token := func() chan struct{} { return make(chan struct{}, 1) }
	return &signals{alerts: token(), parked: token(), reparked: token(), routes: token(), schema: token(), reloaded: token()}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
