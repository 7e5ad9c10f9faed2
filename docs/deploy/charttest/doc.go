// Package charttest checks what docs/deploy has for Kubernetes by the programs that will read it:
// the chart by Helm's linter and engine, every manifest by the types of the Kubernetes API, the
// kustomization by kustomize. It is its own module, so that none of their dependencies is one
// of the relay.
package charttest
