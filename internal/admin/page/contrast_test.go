package page

import (
	"math"
	"regexp"
	"strconv"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// Text and what stands on its own have the contrast that WCAG 2.2 AA asks for, in light and in
// dark.
func TestContrast(t *testing.T) {
	t.Parallel()
	sheet, err := staticFiles.ReadFile("static/app.css")
	relaytest.Must(t, err)
	blocks := regexp.MustCompile(`color-scheme: (?:light|dark);\n([^}]+)}`).FindAllSubmatch(sheet, -1)
	if len(blocks) != 3 || string(blocks[1][1]) != string(blocks[2][1]) {
		t.Fatalf("%d palettes, of which the dark ones differ", len(blocks))
	}
	for name, block := range map[string][]byte{"light": blocks[0][1], "dark": blocks[1][1]} {
		palette := map[string]string{}
		for _, m := range regexp.MustCompile(`--([\w-]+): (#\w+)`).FindAllSubmatch(block, -1) {
			palette[string(m[1])] = string(m[2])
		}
		for least, pairs := range map[float64][][2]string{
			4.5: {
				{"ink", "paper"},
				{"ink", "ground"},
				{"ink", "soft"},
				{"muted", "paper"},
				{"muted", "ground"},
				{"muted", "soft"},
				{"accent", "paper"},
				{"accent", "ground"},
				{"accent-ink", "accent"},
				{"good", "good-soft"},
				{"bad", "bad-soft"},
				{"odd", "odd-soft"},
				{"bad", "paper"},
				{"paper", "bad"},
				{"muted", "good-soft"},
				{"muted", "bad-soft"},
				{"muted", "odd-soft"}, // of headlines, whose ground is between that and paper
			},
			3: {{"edge", "paper"}, {"edge", "ground"}, {"accent", "soft"}, {"good", "paper"}, {"odd", "paper"}, {"p95", "paper"}, {"p99", "paper"}},
		} {
			for _, pair := range pairs {
				if got := contrast(t, palette[pair[0]], palette[pair[1]]); got < least {
					t.Errorf("%s: %s on %s has %.2f, less than %g", name, pair[0], pair[1], got, least)
				}
			}
		}
	}
}

// contrast returns the ratio of WCAG 2 of two colours.
func contrast(t *testing.T, a, b string) float64 {
	t.Helper()
	x, y := luminance(t, a), luminance(t, b)
	return (max(x, y) + 0.05) / (min(x, y) + 0.05)
}

func luminance(t *testing.T, color string) (sum float64) {
	t.Helper()
	if len(color) == 4 {
		color = string([]byte{'#', color[1], color[1], color[2], color[2], color[3], color[3]})
	}
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		part, err := strconv.ParseUint(color[1+2*i:3+2*i], 16, 8)
		relaytest.Must(t, err)
		c := float64(part) / 255
		if c <= 0.04045 {
			sum += weight * c / 12.92
		} else {
			sum += weight * math.Pow((c+0.055)/1.055, 2.4)
		}
	}
	return sum
}
