package main

import (
	"fmt"
	"strings"

	"github.com/outbox-relay/outbox-relay/relay/post"
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
	fmt.Fprintf(inv.Stdout, "%s is valid; it delivers to %s\n", what, strings.Join(c.Children("destinations"), ", "))
	if names := unsigned(c.relay.Destinations); len(names) > 0 {
		fmt.Fprintf(inv.Stdout, "Not signed, since they have no signing_secrets: requests to %s\n", strings.Join(names, ", "))
	}
	return nil
}

// unsigned names the destinations whose requests are not signed.
func unsigned(destinations []post.Destination) (names []string) {
	for _, d := range destinations {
		if len(d.SigningSecrets) == 0 {
			names = append(names, d.Name)
		}
	}
	return names
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
