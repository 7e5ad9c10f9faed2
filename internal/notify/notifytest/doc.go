// Package notifytest has servers that speak for every service to which alerts are sent. Only tests
// import it.
package notifytest
