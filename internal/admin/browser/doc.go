// Package browser tests the page in a real browser: Debian's chromium, headless. It is a module of
// its own, so that nothing else needs what drives the browser.
package browser
