// Package admin serves what operators and their tools read from a running relay over local HTTP.
// [Listen] opens a listener with the limits that every such server has.
package admin
