//go:build tools

// Package tools names the command that this module pins, so that `go mod tidy` keeps its checksums.
package tools

import _ "k8s.io/kubernetes/cmd/kube-proxy"
