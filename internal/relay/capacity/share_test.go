package capacity

import (
	"slices"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

func TestDivide(t *testing.T) {
	t.Parallel()
	idle, active := Sharer{}, Sharer{Active: true}
	open, probe := Sharer{State: policy.BreakerOpen, Active: true, Allowed: 8}, Sharer{State: policy.BreakerHalfOpen, Active: true, Allowed: 1}
	hanging := Sharer{State: policy.BreakerOpen, Active: true, InFlight: 64}
	for name, c := range map[string]struct {
		lanes []Sharer
		want  []int
	}{
		"one":                                 {[]Sharer{active}, []int{256}},
		"two that are active":                 {[]Sharer{active, active}, []int{128, 128}},
		"one that may become active":          {[]Sharer{active, idle}, []int{256, 128}},
		"a held lane takes nothing":           {[]Sharer{active, open}, []int{256, 256}},
		"a probe takes one":                   {[]Sharer{active, probe}, []int{255, 128}},
		"requests that hang count":            {[]Sharer{active, hanging}, []int{192, 256}},
		"a trial takes no more than its part": {[]Sharer{active, {State: policy.BreakerHalfOpen, Allowed: 1000}}, []int{128, 128}},
		"nothing is left":                     {[]Sharer{active, {State: policy.BreakerOpen, InFlight: 300}}, []int{1, 256}},
	} {
		d := Divide(256, c.lanes)
		var got []int
		for _, s := range c.lanes {
			got = append(got, d.Part(s.State, s.Active))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
