package main

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A drawing collects the elements of an SVG. Its colours follow the reader's light or dark theme.
type drawing struct {
	text          strings.Builder
	width, height float64
}

// style has a colour for each system of a plot, readable on white and on black.
const style = `<style>
text { font: 12px system-ui, sans-serif; fill: #333 }
.title { font-size: 14px; font-weight: 600 }
.axis { stroke: #999; stroke-width: 1 } .grid { stroke: #999; stroke-width: 1; opacity: .25 } .range { stroke: #333; stroke-width: 1.5 }
.line { fill: none; stroke-width: 2 } .dashed { stroke-dasharray: 5 4 }
.f0 { fill: #2f81f7 } .f1 { fill: #d9822b } .f2 { fill: #6e9b58 } .f3 { fill: #8e6fc5 } .f4 { fill: #c9517a } .f5 { fill: #8a8f98 }
.s0 { stroke: #2f81f7 } .s1 { stroke: #d9822b } .s2 { stroke: #6e9b58 } .s3 { stroke: #8e6fc5 } .s4 { stroke: #c9517a } .s5 { stroke: #8a8f98 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .range { stroke: #ddd } }
</style>
`

func (d *drawing) label(x, y float64, class, anchor, text string) {
	fmt.Fprintf(&d.text, `<text x="%.1f" y="%.1f" class="%s" text-anchor="%s">%s</text>`+"\n", x, y, class, anchor, html.EscapeString(text))
}

func (d *drawing) line(x1, y1, x2, y2 float64, class string) {
	fmt.Fprintf(&d.text, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" class="%s"/>`+"\n", x1, y1, x2, y2, class)
}

func (d *drawing) rect(x, y, w, h float64, class string) {
	fmt.Fprintf(&d.text, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" class="%s"/>`+"\n", x, y, w, h, class)
}

func (d *drawing) svg(title string) []byte {
	return fmt.Appendf(nil, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f" role="img" aria-label="%s">`+"\n%s%s</svg>\n",
		d.width, d.height, d.width, d.height, html.EscapeString(title), style, d.text.String())
}

// A bar is one figure of a bar chart, as measured in each round.
type bar struct {
	group, system string
	values        []float64
}

// bars draws horizontal bars by group, each with its median and the range of its rounds.
func bars(title string, decimals int, all []bar) []byte {
	const left, right, lineHeight, groupGap = 330, 130, 18, 26
	d := &drawing{width: 860, height: 40}
	most := 0.0
	for _, b := range all {
		most = max(most, slices.Max(b.values))
	}
	scale := (d.width - left - right) / max(most, 1e-9)
	d.label(10, 22, "title", "start", title)
	var systems []string
	group := ""
	for _, b := range all {
		if b.group != group {
			group = b.group
			d.height += groupGap
			d.label(10, d.height-6, "title", "start", group)
		}
		if !slices.Contains(systems, b.system) {
			systems = append(systems, b.system)
		}
		class := strconv.Itoa(slices.Index(systems, b.system) % 6)
		y, middle := d.height, median(b.values)
		d.label(left-8, y+lineHeight-5, "", "end", b.system)
		d.rect(left, y+3, max(middle*scale, 1), lineHeight-6, "f"+class)
		least, greatest := slices.Min(b.values), slices.Max(b.values)
		d.line(left+least*scale, y+lineHeight/2, left+greatest*scale, y+lineHeight/2, "range")
		d.label(left+greatest*scale+6, y+lineHeight-5, "", "start", number(middle, decimals))
		d.height += lineHeight
	}
	d.height += 10
	return d.svg(title)
}

// A curve is one line of a line chart.
type curve struct {
	name   string
	class  string // of its colour, and dashed or not
	points [][2]float64
}

// curves draws lines over two logarithmic axes.
func curves(title, xName, yName string, xs []float64, all []curve) []byte {
	const left, right, top, bottom = 70, 230, 60, 50
	d := &drawing{width: 860, height: 440}
	low, high := math.Inf(1), math.Inf(-1)
	for _, c := range all {
		for _, p := range c.points {
			low, high = min(low, max(p[1], 0.01)), max(high, p[1])
		}
	}
	low, high = math.Floor(math.Log10(low)), math.Ceil(math.Log10(max(high, low*1.01, 0.02)))
	x := func(value float64) float64 {
		span := max(math.Log10(xs[len(xs)-1])-math.Log10(xs[0]), 1e-9)
		return left + (math.Log10(value)-math.Log10(xs[0]))/span*(d.width-left-right)
	}
	y := func(value float64) float64 {
		return d.height - bottom - (math.Log10(max(value, 0.01))-low)/max(high-low, 1e-9)*(d.height-top-bottom)
	}
	d.label(10, 22, "title", "start", title)
	for power := low; power <= high; power++ {
		value := math.Pow(10, power)
		d.line(left, y(value), d.width-right, y(value), "grid")
		d.label(left-8, y(value)+4, "", "end", strconv.FormatFloat(value, 'f', -1, 64))
	}
	for _, value := range xs {
		d.label(x(value), d.height-bottom+18, "", "middle", number(value, 0))
		d.line(x(value), d.height-bottom, x(value), d.height-bottom+4, "axis")
	}
	d.line(left, d.height-bottom, d.width-right, d.height-bottom, "axis")
	d.line(left, top, left, d.height-bottom, "axis")
	d.label((left+d.width-right)/2, d.height-12, "", "middle", xName)
	d.label(10, top-16, "", "start", yName)
	for i, c := range all {
		var path strings.Builder
		for _, p := range c.points {
			fmt.Fprintf(&path, "%.1f,%.1f ", x(p[0]), y(p[1]))
		}
		fmt.Fprintf(&d.text, `<polyline points="%s" class="line %s"/>`+"\n", strings.TrimSpace(path.String()), c.class)
		at := float64(top + 20*i)
		d.line(d.width-right+20, at, d.width-right+50, at, "line "+c.class)
		d.label(d.width-right+58, at+4, "", "start", c.name)
	}
	return d.svg(title)
}

func plotDrain(all results) []byte {
	by := ratio{metric: "rate", toSystem: nameLoop}
	return bars("Events a second beside a bare loop that sends the same requests without a database", 2,
		barsOf(drainWorkload(options{}), func(at place) []float64 { return all.ratios(at, by) }))
}

func plotInsert(all results) []byte {
	return bars("Inserts a second, each in its own transaction", 0,
		barsOf(insertWorkload(options{}), func(at place) []float64 { return all.values(at, "rate") }))
}

// barsOf returns a bar for each entrant of a workload that has values.
func barsOf(w workload, values func(at place) []float64) (list []bar) {
	for _, c := range w.cases {
		for _, e := range c.entrants {
			if found := values(place{c.name, e.system}); len(found) > 0 {
				list = append(list, bar{c.name, e.system, found})
			}
		}
	}
	return list
}

func plotLatency(all results) []byte {
	var xs []float64
	for _, perSecond := range rates {
		xs = append(xs, float64(perSecond))
	}
	var list []curve
	for i, system := range []string{nameOurs, nameTuned, nameRiver, nameTextbook} {
		for _, m := range []struct{ key, class string }{{"p50", ""}, {"p99", " dashed"}} {
			c := curve{name: system + ", " + m.key, class: "s" + strconv.Itoa(i) + m.class}
			for _, perSecond := range rates {
				if values := all.values(place{strconv.Itoa(perSecond) + "/s", system}, m.key); len(values) > 0 {
					c.points = append(c.points, [2]float64{float64(perSecond), median(values)})
				}
			}
			if len(c.points) > 0 {
				list = append(list, c)
			}
		}
	}
	return curves("From the commit of an event to its arrival", "events a second", "milliseconds", xs, list)
}
