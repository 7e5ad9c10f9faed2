package main

import (
	"fmt"
	"strings"
)

type configCmd struct {
	Check configCheckCmd `cmd:"" help:"Find every mistake; exit 3 if there is one."`
	Show  configShowCmd  `cmd:"" help:"Print what is in effect and where each value comes from. Secrets are masked."`
}

type configCheckCmd struct{ settingFlags }

func (configCheckCmd) Run(inv *invocation) error {
	c, err := inv.config()
	if err != nil {
		return err
	}
	what := c.File
	if what == "" {
		what = "the configuration"
	}
	_, err = fmt.Fprintf(inv.Stdout, "%s is valid; it delivers to %s\n", what, strings.Join(c.Children("destinations"), ", "))
	return err
}

type configShowCmd struct{ settingFlags }

func (configShowCmd) Run(inv *invocation) error {
	c, err := inv.config()
	if err != nil {
		return err
	}
	text, err := c.Show()
	if err != nil {
		return err
	}
	_, err = inv.Stdout.Write(text)
	return err
}
