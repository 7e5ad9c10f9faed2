// Package api is the JSON API of an operator: what the commands do, over HTTP. Its OpenAPI document
// is made from the table of routes and the types of their answers, so that it cannot be wrong about
// either.
package api
