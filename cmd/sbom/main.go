// Command sbom checks the licences of everything that the given modules are built and tested with, and writes what a binary
// is made of as a CycloneDX document. It is a module of its own, so that the relay's does not require what it needs.
//
//	sbom -binary bin/outbox-relay -version v1.2.3 . consumer/redisstore >bin/outbox-relay.cdx.json
//
// It exits with 1 and names each module whose licence is missing, unknown or not permissive.
package main

import (
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

func main() {
	binary := flag.String("binary", "", "the program to describe")
	version := flag.String("version", "", "its version")
	flag.Parse()
	if err := run(*binary, *version, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(binary, version string, directories []string) error {
	licences := map[string][]string{}
	var problems []error
	for _, directory := range directories {
		modules, err := modulesOf(directory)
		if err != nil {
			return err
		}
		for _, m := range modules {
			found, err := licencesIn(m.dir)
			if err == nil {
				err = permitted(m.path, found)
			}
			if err != nil {
				problems = append(problems, fmt.Errorf("%s of %s: %w", m, directory, err))
			}
			licences[m.String()] = found
		}
		npm, err := checkLockfiles(directory)
		if err != nil {
			return err
		}
		problems = append(problems, npm...)
	}
	if err := errors.Join(problems...); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "the licences of %d modules are permitted: %s\n", len(licences), strings.Join(distinct(licences), ", "))
	if binary == "" {
		return nil
	}
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return fmt.Errorf("read what %s is made of: %w", binary, err)
	}
	for _, m := range info.Deps {
		if e, excepted := exceptions[m.Path]; excepted {
			return fmt.Errorf("%s holds %s, whose licence %s is excepted because %s", binary, m.Path, e.licence, e.why)
		}
	}
	encoder := cdx.NewBOMEncoder(os.Stdout, cdx.BOMFileFormatJSON).SetPretty(true)
	if err := encoder.EncodeVersion(describe(info, version, licences), cdx.SpecVersion1_6); err != nil {
		return fmt.Errorf("describe %s: %w", binary, err)
	}
	fmt.Fprintf(os.Stderr, "%s is made of %d modules and the standard library of %s\n", binary, len(info.Deps), info.GoVersion)
	return nil
}

func distinct(licences map[string][]string) []string {
	names := slices.Concat(slices.Collect(maps.Values(licences))...)
	slices.Sort(names)
	return slices.Compact(names)
}

// describe returns the modules of a program. It holds no time and no random number: one binary has one description.
func describe(info *buildinfo.BuildInfo, version string, licences map[string][]string) *cdx.BOM {
	main := component(&debug.Module{Path: info.Main.Path, Version: version}, nil)
	main.Type = cdx.ComponentTypeApplication
	components := []cdx.Component{component(&debug.Module{Path: "std", Version: info.GoVersion}, []string{"BSD-3-Clause"})}
	for _, m := range info.Deps {
		for m.Replace != nil {
			m = m.Replace
		}
		components = append(components, component(m, licences[m.Path+"@"+m.Version]))
	}
	needs := make([]string, 0, len(components))
	for _, c := range components {
		needs = append(needs, c.BOMRef)
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Component: &main}
	bom.Components = &components
	bom.Dependencies = &[]cdx.Dependency{{Ref: main.BOMRef, Dependencies: &needs}}
	return bom
}

func component(m *debug.Module, licences []string) cdx.Component {
	purl := "pkg:golang/" + m.Path + "@" + m.Version
	c := cdx.Component{Type: cdx.ComponentTypeLibrary, BOMRef: purl, Name: m.Path, Version: m.Version, PackageURL: purl}
	// The hash of go.sum is SHA-256 over the names and hashes of a module's files.
	if sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:")); err == nil && len(sum) > 0 {
		c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum)}}
	}
	if len(licences) > 0 {
		c.Licenses = &cdx.Licenses{{Expression: strings.Join(licences, " AND ")}}
	}
	return c
}
