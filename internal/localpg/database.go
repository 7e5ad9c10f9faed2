package localpg

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// CreateDatabase makes the database name as a copy of template, or an empty one
// when template is "". No session may be connected to the template meanwhile.
func (s *Server) CreateDatabase(ctx context.Context, name, template string) error {
	if template == "" {
		template = "template0"
	}
	// No STRATEGY: PostgreSQL 14 has none to choose, and file_copy saves 4 ms of
	// 15 but flushes what every other test has just written.
	create := "CREATE DATABASE " + pgx.Identifier{name}.Sanitize() + " TEMPLATE " + pgx.Identifier{template}.Sanitize()
	if err := s.administer(ctx, create); err != nil {
		return fmt.Errorf("create database %s: %w", name, err)
	}
	return nil
}

// DropDatabase removes the database name and ends every session on it. It is
// no error when there is none.
func (s *Server) DropDatabase(ctx context.Context, name string) error {
	drop := "DROP DATABASE IF EXISTS " + pgx.Identifier{name}.Sanitize() + " WITH (FORCE)"
	if err := s.administer(ctx, drop); err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	return nil
}

// administer runs one statement on the maintenance database, on a connection of
// its own: about 3 ms, and none is left to break when the server is restarted.
func (s *Server) administer(ctx context.Context, statement string) error {
	conn, err := pgx.Connect(ctx, s.DSN("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, statement)
	return err
}
