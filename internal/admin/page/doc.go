// Package page is the dashboard: HTML that the server renders, with forms that work without
// scripts. htmx repeats requests so that it lives, and uPlot draws charts; both are embedded.
// Nothing is asked of another host.
package page
