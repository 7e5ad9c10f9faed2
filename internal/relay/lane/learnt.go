package lane

// Learnt returns how many requests at once flow control has found that the receiver bears, and how
// many are configured. The rate, slow start and other lanes may allow fewer.
func (o *outgoing) Learnt() (atOnce, configured int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	configured = o.Destination.MaxInFlight
	return min(configured, max(1, int(o.flow.AtOnce))), configured
}
