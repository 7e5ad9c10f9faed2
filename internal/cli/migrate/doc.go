// Package migrate is the command migrate, which creates, upgrades, reverts and lists the tables.
package migrate
