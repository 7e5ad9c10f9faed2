// Package settings reads a program's configuration: flags over environment over a YAML file over
// defaults.
//
// A program describes its settings in one table of [Row]s: where a setting stands in the file, its
// variable, its flag, how its text is parsed, its default, and the typed field that receives it.
// [Load] reads every source along the table and returns a [Set]; [Set.Bind] writes the values into
// the fields. A Set knows where each value comes from, so that each [Problem] names its file and
// line, variable or flag, and [Set.Show] prints the origin of every value.
package settings
