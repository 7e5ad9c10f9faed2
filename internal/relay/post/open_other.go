//go:build !unix

package post

import "net"

// canSeeClosed says that isOpen cannot know, so that requests go by http.Transport.
const canSeeClosed = false

func isOpen(net.Conn) bool { return false }

// A rawConn is for systems on which requests are sent directly.
type rawConn struct{}

func newRawConn(net.Conn) *rawConn { return nil }

func (*rawConn) exchange(*directConn, []byte, []byte) (int, error) { return 0, errStale }
